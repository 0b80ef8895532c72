"""Texts, and the SeqIO tasks that objectives make of them.

A text such as "sotu" is a source of documents. It is a task itself, whose `targets` are a document's tokens, and
"sotu_span_corruption" is the task of what an objective makes of these.
"""

import functools
from collections.abc import Callable, Iterator

import seqio
from t5.data import preprocessors as t5

from t5x_lab.config.errors import UserError
from t5x_lab.data.objective import Objective

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)  # of a task that no run has given another: it needs no file


class ObjectiveTask(seqio.Task):
    """What an objective makes of a text's tokens: a SeqIO task that knows its objective."""

    def __init__(self, *args, objective: Objective, **kwargs):
        super().__init__(*args, **kwargs)
        self.objective = objective


def text_task(name: str, source: seqio.DataSource, vocabulary: seqio.Vocabulary = VOCABULARY) -> seqio.Task:
    """A document's tokens as `targets`, without an end token; inputs, which it has not, let it stand in mixtures beside tasks
    that have them.

    Args:
      name: of the task.
      source: of {"text": document}.
      vocabulary: what makes tokens of it.
    """
    inputs = seqio.Feature(vocabulary, add_eos=False, required=False)
    return seqio.Task(
        name,
        source,
        output_features={"inputs": inputs, "targets": seqio.Feature(vocabulary, add_eos=False)},
        preprocessors=[
            functools.partial(t5.rekey, key_map={"targets": "text"}),
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
        ],
    )


def with_objective(name: str, text: seqio.Task, objective: Objective) -> ObjectiveTask:
    """The task that makes an objective's examples of the tokens that `text` has as its targets.

    Tokens may be cached; what an objective does to them is random, and comes after.
    """
    vocabulary = text.output_features["targets"].vocabulary
    features = {name: seqio.Feature(vocabulary, add_eos=name in objective.features_with_eos) for name in objective.features}
    before = [step for step in text.preprocessors if not isinstance(step, seqio.CacheDatasetPlaceholder)]
    steps = [*before, seqio.CacheDatasetPlaceholder(), *objective.preprocessors()]
    return ObjectiveTask(
        name,
        text.source,
        output_features=features,
        preprocessors=steps,
        shuffle_buffer_size=text.shuffle_buffer_size,
        objective=objective,
    )


class OpenedWhenRead(seqio.DataSource):
    """A source that is made when something is read of it, and not before: it may lie where this machine cannot reach it.

    Args:
      open: makes it.
      splits: that it has.
      what: what is opened, in words that tell it from others.
    """

    def __init__(self, open: Callable[[], seqio.DataSource], splits: tuple[str, ...] = ("train", "validation"), what: str = ""):
        super().__init__(splits=splits)
        self._open, self.what = open, what

    @functools.cached_property
    def source(self) -> seqio.DataSource:
        return self._open()

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return self.source.supports_arbitrary_sharding

    def list_shards(self, split: str):
        return self.source.list_shards(split)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **options):
        return self.source.get_dataset(split, shuffle, seed, shard_info, **options)

    def num_input_examples(self, split: str) -> int | None:
        return self.source.num_input_examples(split)


def documents_of_task(task: seqio.Task, limit: int = -1) -> Iterator[str]:
    """Texts of a task's training split, before any preprocessing; -1 = all.

    Raises:
      UserError: where its examples hold no text.
    """
    for example in task.source.get_dataset("train", shuffle=False).take(limit).as_numpy_iterator():
        text = example.get("text", example.get("targets"))
        if not isinstance(text, bytes):
            raise UserError(f'The examples of task "{task.name}" have no "text"; they have {", ".join(example)}.')
        yield text.decode("utf-8", errors="replace")
