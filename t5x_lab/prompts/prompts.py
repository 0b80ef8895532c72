"""`Prompts`: the settings of prompted datasets, and the task names that they define.

Free of TensorFlow until a name is used.
"""

import dataclasses
from collections.abc import Iterable

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError
from t5x_lab.prompts.classification.config import CLASSIFICATIONS, TASK_PREFIX, Classification
from t5x_lab.prompts.config import Collection, PromptConfig, Records, task_slug


@dataclasses.dataclass(frozen=True)
class Prompts(PromptConfig):
    """Prompted datasets: labelled records rendered by templates. `t5x_lab.prompts.names` lists the task names.

    Attributes:
      templates: folders of template files in promptsource's layout, <data set>/templates.yaml. For each data set the first
        folder that has it is used, the library's own last.
      records: location of all data sets, by one pattern.
      data_sets: locations of single data sets by name, the user's own included.
      collections: the user's collections by name.
      classifications: the user's classification tasks by name: "mine" defines the task "classify_mine".
      clean: f(text) -> text, applied to texts of classification tasks and probes, such as @standardize. None = unchanged.
      few_shot: format of few-shot prompts.
      input_eos: whether an EOS token separates inputs and targets.
    """

    def __post_init__(self):
        check_types(self)
        settings = (
            ("DATA_SETS", self.data_sets, Records),
            ("COLLECTIONS", self.collections, Collection),
            ("CLASSIFICATIONS", self.classifications, Classification),
        )
        for setting, entries, cls in settings:
            for name, entry in entries.items():
                if not isinstance(entry, cls):
                    raise UserError(f'{setting}["{name}"] is {entry!r}. It must be {cls.__name__}, as @x/{cls.__name__}().')

    def classification(self, name: str) -> Classification | None:
        """Returns the classification task of this name, None for any other name."""
        return self._classifications().get(name)

    def classification_names(self) -> list[str]:
        """Returns the names of all classification tasks."""
        return list(self._classifications())

    def _classifications(self) -> dict[str, Classification]:
        entries = {task_slug(name): entry for name, entry in {**CLASSIFICATIONS, **self.classifications}.items()}
        return {f"{TASK_PREFIX}{name}": entry for name, entry in entries.items()}

    def register(self, name: str) -> bool:
        """Registers the task or mixture of this name with SeqIO. Returns False if the name is not a prompted one.

        Raises:
          UserError: if templates or records are missing, or a template cannot be used as the name asks.
        """
        from t5x_lab.prompts.names import register_by_name  # needs TensorFlow

        return register_by_name(name, self)

    def without(self, name: str, tasks: Iterable[str]) -> str:
        """Returns the name of a collection without the data sets of these tasks, "" if there is none."""
        from t5x_lab.prompts.names import exclude  # needs TensorFlow

        return exclude(name, tasks)

    def names(self) -> Iterable[str]:
        """Returns names of data sets and collections, to suggest one for a mistyped name."""
        from t5x_lab.prompts.names import names  # needs TensorFlow

        return names(self)
