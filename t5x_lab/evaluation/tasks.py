"""The SeqIO tasks that an evaluation reads: the run's own or any other."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import seqio

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.log import log
from t5x_lab.config.user_code import describe_error
from t5x_lab.data.cache.reading import split_source
from t5x_lab.data.config import DataConfig, stable_repr
from t5x_lab.data.pipeline.batches import resolve_tasks
from t5x_lab.data.pipeline.checks import check_data_available
from t5x_lab.data.sources.sharding import file_sizes
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.data.tasks.names import names_an_objective
from t5x_lab.data.vocabularies.truncation import cut_left, cut_right
from t5x_lab.evaluation.evaluation import TaskEvaluation


@dataclasses.dataclass(frozen=True)
class EvaluationTasks:
    """The tasks of an evaluation.

    Attributes:
      name: name of the evaluation.
      mixture: the task or mixture, with all of its components.
      components: the components that are evaluated.
      data: data configuration. Its `eval_split` is the evaluation's.
      is_explicit: whether the evaluation names a task or a split, which must then exist. Else they are the run's.
    """

    name: str
    mixture: ResolvedMixture
    components: list[Component]
    data: DataConfig
    is_explicit: bool

    def only(self, fits: Callable[[Component], bool], requirement: str) -> "EvaluationTasks":
        """Returns a copy with only the components that fit. The others are reported as having no `requirement`.

        Raises:
          UserError: if the evaluation names its tasks and none fits.
        """
        components = [component for component in self.components if fits(component)]
        unfit = [f'"{component.task.name}"' for component in self.components if component not in components]
        if unfit and self.is_explicit:
            sentence = f'Evaluation "{self.name}": {", ".join(unfit[:3])}{_and_more(unfit)} has no {requirement}'
            if not components:
                raise UserError(f"{sentence}. Set another task or split, or remove the evaluation from EVALS.")
            log(f"{sentence}. It is not evaluated.")
        return dataclasses.replace(self, components=components)

    def read_each(
        self, read: Callable[[Component], tuple], failures: dict[str, str], consequence: str
    ) -> Iterator[tuple[Component, tuple]]:
        """Yields each component with the result of `read`.

        Args:
          read: returns a tuple. Its last entry is a list, empty if the split is empty.
          failures: receives the reason if a component cannot be read.
          consequence: end of the message about an empty split, such as "nothing is ranked".
        """
        for component in self.components:
            name = component.task.name
            try:
                result = read(component)
            except UserError as error:
                if jax.process_count() > 1:
                    raise  # other processes may have read it, and would wait
                failures[name] = error.sentence
                continue
            if result[-1]:
                yield component, result
            else:
                log(f'The {self.data.eval_split} split of task "{name}" is empty; {consequence}.')

    def settings(self, evaluation: TaskEvaluation) -> dict[str, str]:
        """Returns everything that the evaluation's numbers depend on, except the weights."""
        fields = (field.name for field in dataclasses.fields(evaluation) if field.name not in _IRRELEVANT_FIELDS)
        own = {name: stable_repr(getattr(evaluation, name)) for name in fields}
        own = {name: value for name, value in own.items() if value != _LATER_FIELDS.get(name)}
        data = self.data.identity()
        settings = {name: data[name] for name in _RELEVANT_DATA_SETTINGS if data[name] != "()"}
        if any(getattr(component.task, "data_set", "") for component in self.components):  # prompted: depends on templates
            fingerprints = [getattr(component.task, "fingerprint", "") for component in self.components]
            settings |= {"Prompts": data["Prompts"], "templates": f"{zlib.crc32(' '.join(fingerprints).encode()):08x}"}
        converter = {"converter": stable_repr(self.data.converter)} if self.data.converter else {}
        return {
            **own,
            **settings,
            **converter,
            "kind": type(evaluation).__name__,
            "task": self.data.mixture_or_task_name,
            "split": self.data.eval_split,
        }


_LATER_FIELDS = {"num_samples": "1"}  # values that older results had without these fields
# Empty ones are left out, so that settings of older results, which did not have them, stay equal.
_RELEVANT_DATA_SETTINGS = (
    "OBJECTIVE",
    "TASK_FEATURE_LENGTHS",
    "VOCABULARY",
    "SpecialTokens.input_start",
    "TextFiles",
    "TEXTS",
)
_IRRELEVANT_FIELDS = {"name", "task", "split", "lengths", "period", "steps", "at_start", "outputs", "weights", "batch_size"}


def resolve_evaluation_tasks(evaluation: TaskEvaluation, model: Any, batch_size: int | None = None) -> EvaluationTasks:
    """Returns the tasks of an evaluation. No data are read, but those of an explicitly named task must be available.

    Args:
      evaluation: settings of the evaluation.
      model: a `t5x_lab.runs.model.run.Run`.
      batch_size: rows per batch. None = BATCH_SIZE.

    Raises:
      UserError: for a task, a split or lengths that do not exist or do not fit the model. The message names the evaluation.
    """
    with evaluation_context(evaluation.name):
        run_data = model.config.data()
        data = dataclasses.replace(
            run_data,
            mixture_or_task_name=evaluation.task or run_data.mixture_or_task_name,
            task_feature_lengths=evaluation.lengths or run_data.task_feature_lengths,
            eval_split=evaluation.split or run_data.eval_split,
            batch_size=batch_size or run_data.batch_size,
            shards=1,
            mixing=None,
            unique_tokens=None,
        )
        if evaluation.task and names_an_objective(evaluation.task, data):
            data = dataclasses.replace(data, objective=None)
        # Resolving hundreds of tasks takes a while, and several evaluations use the same ones.
        key = str((data.mixture_or_task_name, data.task_feature_lengths, data.objective))
        if key not in model.resolved:
            model.resolved[key] = resolve_tasks(data, model.network.architecture, model.network.vocab_size)
        mixture = model.resolved[key]
    is_explicit = bool(evaluation.task or evaluation.split)
    tasks = EvaluationTasks(evaluation.name, mixture, list(mixture.components), data, is_explicit)
    splits = sorted({split for component in mixture.components for split in component.task.splits})
    requirement = f'split "{data.eval_split}"; the splits are {", ".join(splits)}'
    tasks = tasks.only(lambda component: data.eval_split in component.task.splits, requirement)
    if is_explicit:
        with evaluation_context(evaluation.name):
            setting = f"{type(evaluation).__name__}.task"
            check_data_available(tasks.components, data.eval_split, mixture.name, data, setting)
        for component in tasks.components:
            _check_source(evaluation.name, component, data.eval_split)
    return tasks


def _check_source(evaluation: str, component: Component, split: str) -> None:
    """Raises a `UserError` if the data of a task are not available."""
    try:
        source = component.task.source
        files = list(source.list_shards(split))
        is_file = isinstance(split_source(source, split), seqio.FileDataSource)
        is_missing = not files or (is_file and file_sizes(files[:1]) == [None])
        reason = f"there is no {', '.join(files[:1]) or 'file'}"
    except UserError:
        raise
    except Exception as error:  # a user's source may raise anything
        is_missing, reason = True, describe_error(error)
    if is_missing:
        raise NotHere(
            f'Evaluation "{evaluation}": the split "{split}" of task "{component.task.name}" cannot be read: {reason}.'
        )


@contextlib.contextmanager
def evaluation_context(name: str) -> Iterator[None]:
    """Prefixes the messages of `UserError`s with the name of the evaluation."""
    try:
        yield
    except UserError as error:
        error.sentence = f'Evaluation "{name}": {error.sentence}'
        error.args = (error.sentence,)
        raise


class TruncatedInputs:
    """Inputs of examples, truncated as an evaluation says.

    Args:
      model: a `Run`.
      component: the task of the examples.
      examples: of the task.
      truncate_inputs: see `OutputEvaluation.truncate_inputs`.
      reserved: tokens that the model writes or scores after the inputs.

    Attributes:
      ids: input ids of each example, with the component's input prefix.
      limit: maximum number of tokens. None = unlimited.
      num_cut: number of truncated inputs.
    """

    def __init__(self, model: Any, component: Component, examples: Sequence[dict], truncate_inputs: str | None, reserved: int):
        whole = [example["inputs"].tolist() if "inputs" in example else [] for example in examples]
        prefix = component.input_prefix
        positions = model.max_positions and model.max_positions - len(prefix) - (0 if model.has_encoder else reserved)
        self.limit = component.sequence_length.get("inputs") if truncate_inputs else positions
        cut = cut_left if truncate_inputs == "left" else functools.partial(cut_right, stop_ids=model.stop_ids)
        truncated = [cut(ids, self.limit) for ids in whole]
        self.num_cut = sum(len(a) < len(b) for a, b in zip(truncated, whole, strict=True))
        self.ids = [[*prefix, *ids] for ids in truncated]


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
