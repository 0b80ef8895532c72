"""`GinConfig`: a parsed gin configuration, from which a command builds the parts that it needs."""

import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from t5x_lab.config import gin_files
from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.config.macros import defined_macros, macro_bindings
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.config.temporary import make_temporary_folder
from t5x_lab.data.config import DataConfig
from t5x_lab.data.vocabularies.config import SpecialTokens, Vocabulary
from t5x_lab.models.config import ModelConfig
from t5x_lab.optim.optimizers import Optimizer
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.partitioning.rules import ShardingRules
from t5x_lab.prompts.classification.config import Classification
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.runs.config.configurables import CONFIGURABLES
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.config.task_defaults import find_classification
from t5x_lab.runs.config.trust import check_trusted

DEFAULTS = "runs/defaults.gin"
HINTS = {
    "MODEL": "Add a model file, for example --gin_file=models/t5_1_1/small.gin.",
    "MIXTURE_OR_TASK_NAME": "Add an objective file, for example --gin_file=objectives/span_corruption.gin, or set a task.",
    "TASK_FEATURE_LENGTHS": 'It is the number of tokens per feature, for example {"inputs": 512, "targets": 114}.',
    "MODEL_DIR": "It is the run directory.",
}


def known_macros() -> frozenset[str]:
    """Returns the macros of dataclass fields and of the defaults of every run."""
    of_fields = re.findall(r"= %([A-Z][A-Z0-9_]*)$", "\n".join(macro_bindings(CONFIGURABLES)), re.MULTILINE)
    return frozenset([*of_fields, *defined_macros((gin_files.PACKAGE_GIN / DEFAULTS).read_text())])


class GinConfig:
    """A parsed configuration. Its parts are built when they are used.

    Args:
      files, bindings, search_paths, source: see `t5x_lab.config.gin_files.parse`.

    Attributes:
      text: the whole configuration as one gin file.
    """

    def __init__(
        self,
        files: Sequence[str] = (),
        bindings: Sequence[str] = (),
        search_paths: Sequence[str] = (),
        source: str = "on the command line",
    ):
        gin_files.parse([DEFAULTS, *files], bindings, search_paths, source, before="\n".join(macro_bindings(CONFIGURABLES)))
        self.text = gin_files.config_text()

    @property
    def used_text(self) -> str:
        """The part of the configuration that a run depends on."""
        gin_files.parse([], [self.text])
        return gin_files.config_text("RunConfig")

    def build(self, selector: str) -> Any:
        """Builds a configurable or the value of a parameter. See `t5x_lab.config.gin_files.build`."""
        gin_files.parse([], [self.text])  # gin's state is global, and another configuration may have been parsed since
        return gin_files.build(selector, HINTS)

    def run(self) -> RunConfig:
        return self.build("RunConfig")

    def model(self) -> ModelConfig:
        return self.build("RunConfig.model")

    def data(self) -> DataConfig:
        return self.build("DataConfig")

    def prompts(self) -> Prompts:
        return self.build("DataConfig.prompts")

    def classification(self) -> Classification:
        """Returns the run's classification task.

        Raises:
          UserError: if the task is not a classification task.
        """
        task = self.build("task_head.task") or self.build("DataConfig.mixture_or_task_name")  # with a user's head
        return find_classification(task, self.prompts())

    def mesh(self) -> MeshShape:
        return MeshShape.parse(self.build("RunConfig.mesh"))

    def sharding(self) -> ShardingRules:
        return self.build("RunConfig.sharding")

    def evals(self) -> tuple:
        return tuple(self.build("RunConfig.evals"))

    def trainable(self) -> str | None:
        return self.build("RunConfig.trainable")

    def optimizer(self) -> Optimizer:
        return self.build("RunConfig.optimizer")

    def keeps_average(self) -> bool:
        return self.build("RunConfig.average_decay") is not None

    def vocabulary(self) -> Vocabulary:
        return self.build("DataConfig.vocabulary")

    def input_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary of inputs."""
        return self.build("DataConfig.input_vocabulary") or self.vocabulary()

    def vocabulary_if_set(self) -> Vocabulary | None:
        """Returns the vocabulary, None for a model of token ids."""
        try:
            return self.vocabulary()
        except NotSet:
            return None

    def special_tokens(self) -> SpecialTokens:
        return self.build("DataConfig.special_tokens")


def is_run_directory(path: str) -> bool:
    """Returns whether a training run has written its configuration there."""
    return is_regular_file(epath.Path(path) / "config.gin")


def run_config_file(model_dir: str, trust: bool = False) -> str:
    """Returns the path of a run directory's config.gin.

    Args:
      model_dir: run directory.
      trust: whether the configuration may run any Python code.

    Raises:
      UserError: if it does not exist or is not trusted.
    """
    path = epath.Path(model_dir) / "config.gin"
    if not is_run_directory(model_dir):
        raise UserError(f"{model_dir} is not a run directory: it has no config.gin. Use the MODEL_DIR of a training run.")
    if not trust:
        check_trusted(path.read_text(), path)
    return str(path)


def local_file(text: str) -> str:
    """Writes a configuration to a temporary file, since gin reads files only."""
    file = make_temporary_folder() / "config.gin"
    file.write_text(text)
    return str(file)
