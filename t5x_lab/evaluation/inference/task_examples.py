"""Examples for inference from SeqIO tasks and mixtures."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.pipeline.reading import read_split
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.data.vocabularies.truncation import cut_right
from t5x_lab.evaluation.classification import classification_examples
from t5x_lab.evaluation.examples import Example, feature_text
from t5x_lab.evaluation.inference.files import MODES
from t5x_lab.evaluation.ranking.ranked_tasks import is_ranked, ranking_examples


def read_task_examples(
    mixture: ResolvedMixture,
    split: str,
    mode: str,
    vocabularies: Mapping[str, seqio.Vocabulary],
    *,
    stop_ids: tuple[int, ...] = (),
    cut: bool = True,
    shard_id: int = 0,
    num_shards: int = 1,
) -> Iterator[Example]:
    """Reads the examples of all tasks of a mixture, one task after the other.

    Args:
      mixture: a task or mixture.
      split: such as "validation".
      mode: one of `MODES`.
      vocabularies: the model's, of "inputs" and of "targets".
      stop_ids: the model's stop ids.
      cut: whether inputs are truncated to TASK_FEATURE_LENGTHS, on the right, before their EOS token, as in training.
      shard_id, num_shards: read examples k, k + n, and so on.

    Raises:
      UserError: if a task has no such split, no targets to score, no choices to rank, or another vocabulary.
    """
    components = mixture.components
    if mode == "rank" and (ranked := tuple(filter(is_ranked, components))):
        skipped = [component.task.name for component in components if component not in ranked]
        if skipped:
            log(f"{', '.join(skipped)} of {mixture.name} have no choices to rank. --mode=predict reads them.")
        components = ranked
    for component in components:
        _check_task(component.task, split, mode, vocabularies)

    def truncate(component: Component, ids: list[int]) -> list[int]:
        return cut_right(ids, component.sequence_length.get("inputs"), stop_ids) if cut else ids

    read = {"rank": ranking_examples, "classify": classification_examples}.get(mode, _read_component)
    examples = itertools.chain.from_iterable(read(mixture, component, split, truncate) for component in components)
    for number, example in enumerate(examples):
        if number % num_shards == shard_id:
            yield dataclasses.replace(example, number=number)


def _check_task(task: seqio.Task, split: str, mode: str, vocabularies: Mapping[str, seqio.Vocabulary]) -> None:
    if split not in task.splits:
        raise UserError(f'Task "{task.name}" has no split "{split}". It has {", ".join(sorted(task.splits))}.')
    for name in MODES[mode][1:]:
        if name not in task.output_features:
            raise UserError(f'Task "{task.name}" has no "{name}", which --mode={mode} needs.')
    if mode != "classify" and getattr(task, "classification", None):
        raise UserError(f'The task "{task.name}" is a classification task. Use --mode=classify.')
    for name, feature in task.output_features.items():
        vocabulary = vocabularies.get(name, vocabularies["targets"])
        if feature.vocabulary != vocabulary and not isinstance(feature.vocabulary, seqio.PassThroughVocabulary):
            raise UserError(
                f'Feature "{name}" of task "{task.name}" has the vocabulary {feature.vocabulary}, but the checkpoint was '
                f"trained with {vocabulary}. Their ids stand for different tokens. Prepare the task with the checkpoint's."
            )


def _read_component(mixture: ResolvedMixture, component: Component, split: str, truncate: Callable) -> Iterator[Example]:
    task = component.task
    for number, example in enumerate(read_split(component, split).as_numpy_iterator()):
        location = f'task "{task.name}", {split}, example {number}'
        ids = {name: example[name].tolist() for name in task.output_features if name in example}
        texts = {
            name: feature_text(example, name, task.output_features[name].vocabulary)
            for name in ("inputs", "targets")
            if name in ids
        }
        whole = ids.get("inputs", [])
        inputs = truncate(component, whole)
        record = {"task": task.name, "inputs": "", **texts}
        yield Example(record, [*component.input_prefix, *inputs], ids.get("targets"), location, cut=len(whole) - len(inputs))
