"""SeqIO tasks of plain text, and the tasks that objectives make of them.

A text such as "sotu" is a source of documents. It is a task itself, whose `targets` are a document's tokens.
"sotu_span_corruption" is the task that the objective makes of these tokens.
"""

import functools
from collections.abc import Callable, Iterator

import seqio
from t5.data import preprocessors as t5

from t5x_lab.config.errors import UserError
from t5x_lab.data.objectives.objective import Objective

BYTE_VOCABULARY = seqio.ByteVocabulary(extra_ids=100)  # placeholder until a run sets its own; needs no file


class ObjectiveTask(seqio.Task):
    """SeqIO task that applies an objective to the tokens of a text."""

    def __init__(self, *args, objective: Objective, **kwargs):
        super().__init__(*args, **kwargs)
        self.objective = objective


def text_task(name: str, source: seqio.DataSource, vocabulary: seqio.Vocabulary = BYTE_VOCABULARY) -> seqio.Task:
    """Returns the task whose `targets` are a document's tokens, without EOS.

    It declares optional inputs, so that it can be mixed with tasks that have inputs.

    Args:
      name: name of the task.
      source: source of {"text": document}.
      vocabulary: vocabulary that tokenizes the text.
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


def objective_task(name: str, text: seqio.Task, objective: Objective) -> ObjectiveTask:
    """Returns the task that applies an objective to the targets of a text task.

    The cache placeholder follows tokenization. The objective is random and comes after it.
    """
    vocabulary = text.output_features["targets"].vocabulary
    features = {name: seqio.Feature(vocabulary, add_eos=name in objective.features_with_eos) for name in objective.features}
    text_steps = [step for step in text.preprocessors if not isinstance(step, seqio.CacheDatasetPlaceholder)]
    return ObjectiveTask(
        name,
        text.source,
        output_features=features,
        preprocessors=[*text_steps, seqio.CacheDatasetPlaceholder(), *objective.preprocessors()],
        shuffle_buffer_size=text.shuffle_buffer_size,
        objective=objective,
    )


class LazySource(seqio.DataSource):
    """Source that is created when it is first read. Its data may be on storage that this machine cannot reach.

    Args:
      create: returns the source.
      splits: its splits.
      cache_content: description that distinguishes it from other sources, for caches.
    """

    def __init__(
        self,
        create: Callable[[], seqio.DataSource],
        splits: tuple[str, ...] = ("train", "validation"),
        cache_content: str = "",
    ):
        super().__init__(splits=splits)
        self._create, self.cache_content = create, cache_content

    @functools.cached_property
    def source(self) -> seqio.DataSource:
        return self._create()

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return self.source.supports_arbitrary_sharding

    def list_shards(self, split: str):
        return self.source.list_shards(split)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **options):
        return self.source.get_dataset(split, shuffle, seed, shard_info, **options)

    def num_input_examples(self, split: str) -> int | None:
        return self.source.num_input_examples(split)


def task_documents(task: seqio.Task, limit: int = -1, shuffle_seed: int | None = None) -> Iterator[str]:
    """Yields the texts of a task's training split before any preprocessing.

    Args:
      task: a task whose examples have "text" or "targets".
      limit: maximum number of texts, -1 = all.
      shuffle_seed: seed of the order of files. None = their own order.

    Raises:
      UserError: if its examples have no text.
    """
    for example in (
        task.source.get_dataset("train", shuffle=shuffle_seed is not None, seed=shuffle_seed).take(limit).as_numpy_iterator()
    ):
        text = example.get("text", example.get("targets"))
        if not isinstance(text, bytes):
            raise UserError(f'The examples of task "{task.name}" have no "text". They have {", ".join(example)}.')
        yield text.decode("utf-8", errors="replace")
