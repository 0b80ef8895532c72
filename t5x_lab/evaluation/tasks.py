"""The tasks that an evaluation is on: the run's own or any other, read as the evaluation says."""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import seqio

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.user_code import told
from t5x_lab.data.caches import opened
from t5x_lab.data.checks import check_here
from t5x_lab.data.config import DataConfig, by_name
from t5x_lab.data.mixture import Part, WeightedTasks
from t5x_lab.data.pipeline import resolve_tasks
from t5x_lab.data.sources import sizes_of
from t5x_lab.data.tasks import says_its_objective
from t5x_lab.evaluation.config import TaskEvaluation
from t5x_lab.observe.console import say


@dataclasses.dataclass(frozen=True)
class EvaluatedTasks:
    """What an evaluation reads.

    Attributes:
      name: of the evaluation.
      tasks: all of the mixture.
      parts: those of them that are evaluated.
      data: how they are read; its `eval_split` is the evaluation's.
      is_asked_for: whether the evaluation names a task or a split, which must be there then; else they are the run's.
    """

    name: str
    tasks: WeightedTasks
    parts: list[Part]
    data: DataConfig
    is_asked_for: bool

    def only(self, fits: Callable[[Part], bool], what: str) -> "EvaluatedTasks":
        """Those parts that fit; the others are said to have no `what`.

        Raises:
          UserError: when none is left of those asked for.
        """
        parts = [part for part in self.parts if fits(part)]
        without = [f'"{part.task.name}"' for part in self.parts if part not in parts]
        if without and self.is_asked_for:
            sentence = f'Evaluation "{self.name}": {", ".join(without[:3])}{_more(without)} has no {what}'
            if not parts:
                raise UserError(f"{sentence}. Name another task or split, or take it out of EVALS.")
            say(f"{sentence}; it is not evaluated.")
        return dataclasses.replace(self, parts=parts)

    def read_each(
        self, read: Callable[[Part], tuple], failures: dict[str, str], unmeasured: str
    ) -> Iterator[tuple[Part, tuple]]:
        """The parts, with what `read` gives of each. Why one cannot be read goes into `failures`; of one whose last entry is
        empty this is said, and what is `unmeasured` for it."""
        for part in self.parts:
            name = part.task.name
            try:
                found = read(part)
            except UserError as error:
                if jax.process_count() > 1:
                    raise  # the others may have read it, and would wait
                failures[name] = error.sentence
                continue
            if found[-1]:
                yield part, found
            else:
                say(f'The {self.data.eval_split} split of task "{name}" is empty; {unmeasured}.')

    def settings(self, how: TaskEvaluation) -> dict[str, str]:
        """What numbers of the evaluation depend on, beside the weights' step."""
        fields = (field.name for field in dataclasses.fields(how) if field.name not in _NOT_MEASURED)
        own = {name: by_name(getattr(how, name)) for name in fields}
        data = self.data.identity()
        read = {name: data[name] for name in _READ if data[name] != "()"}
        if any(getattr(part.task, "data_set", "") for part in self.parts):  # in words, which depend on templates
            words = [getattr(part.task, "words", "") for part in self.parts]
            read |= {"Prompts": data["Prompts"], "templates": f"{zlib.crc32(' '.join(words).encode()):08x}"}
        converter = {"converter": by_name(self.data.converter)} if self.data.converter else {}
        return {
            **own,
            **read,
            **converter,
            "kind": type(how).__name__,
            "task": self.data.mixture_or_task_name,
            "split": self.data.eval_split,
        }


# Those that are empty do not count: results of before there were any stay what they are.
_READ = ("OBJECTIVE", "TASK_FEATURE_LENGTHS", "VOCABULARY", "SpecialTokens.input_start", "TextFiles", "TEXTS")
_NOT_MEASURED = {"name", "task", "split", "lengths", "period", "steps", "at_start", "outputs", "weights", "batch_size"}


def evaluated_tasks(how: TaskEvaluation, model: Any, batch_size: int | None = None) -> EvaluatedTasks:
    """What `how` is on, for a `t5x_lab.runs.run.Run`, in batches of BATCH_SIZE unless given. No data are read; that those of a
    task which is asked for are here is looked up.

    Raises:
      UserError: that names the evaluation, for a task, a split or lengths that are not there or do not fit the model.
    """
    with naming(how.name):
        run = model.config.data()
        network = model.network
        data = dataclasses.replace(
            run,
            mixture_or_task_name=how.task or run.mixture_or_task_name,
            task_feature_lengths=how.lengths or run.task_feature_lengths,
            eval_split=how.split or run.eval_split,
            batch_size=batch_size or run.batch_size,
            shards=1,
            mixing=None,
            unique_tokens=None,
        )
        if how.task and says_its_objective(how.task, data):
            data = dataclasses.replace(data, objective=None)
        # Hundreds of tasks take a while, and several evaluations are on the same ones.
        key = str((data.mixture_or_task_name, data.task_feature_lengths, data.objective))
        if key not in model.resolved:
            model.resolved[key] = resolve_tasks(data, network.architecture, network.vocab_size)
        tasks = model.resolved[key]
    asked_for = bool(how.task or how.split)
    found = EvaluatedTasks(how.name, tasks, list(tasks.parts), data, asked_for)
    splits = sorted({split for part in tasks.parts for split in part.task.splits})
    what = f'split "{data.eval_split}"; the splits are {", ".join(splits)}'
    found = found.only(lambda part: data.eval_split in part.task.splits, what)
    if asked_for:
        with naming(how.name):
            check_here(found.parts, data.eval_split, tasks.name, data, f"{type(how).__name__}.task")
        for part in found.parts:
            _check_source(how.name, part, data.eval_split)
    return found


def _check_source(name: str, part: Part, split: str) -> None:
    """Raises a `UserError` where the data of a task are not here."""
    try:
        files = list(part.task.source.list_shards(split))
        is_file = isinstance(opened(part.task.source, split), seqio.FileDataSource)
        missing, why = not files or (is_file and sizes_of(files[:1]) == [None]), f"there is no {', '.join(files[:1]) or 'file'}"
    except UserError:
        raise
    except Exception as error:  # a user's source may raise anything
        missing, why = True, told(error)
    if missing:
        raise NotHere(f'Evaluation "{name}": the split "{split}" of task "{part.task.name}" cannot be read: {why}.')


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts an evaluation's name before the sentences of mistakes in it."""
    try:
        yield
    except UserError as error:
        error.sentence = f'Evaluation "{name}": {error.sentence}'
        error.args = (error.sentence,)
        raise


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
