"""Data settings that gin binds. Free of TensorFlow; opens no file."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.macros import macro
from t5x_lab.data.converter import Converter
from t5x_lab.data.objectives.named import get_objective
from t5x_lab.data.objectives.objective import Objective
from t5x_lab.data.vocabularies.config import SpecialTokens, Vocabulary


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Mixing rates computed from numbers of training examples (Raffel et al., section 3.5.2), in place of the mixture's own.

    With e_m examples in task m, r_m = min(e_m, K) ** (1 / T), divided by their sum.

    Attributes:
      maximum: K, the artificial data set size limit. None = no limit.
      temperature: T. 1 is examples-proportional mixing.
      equal: whether all rates are equal.
      num_examples: number of examples by task, for tasks with an unknown number, or to override it. T5 counts 710,000 examples
        of unlabelled text for its small model.
    """

    maximum: int | None = None
    temperature: float = 1.0
    equal: bool = False
    num_examples: dict[str, int] | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, "maximum", "temperature")

    def rate(self, num_examples: int) -> float:
        """Returns r_m before normalization."""
        return 1.0 if self.equal else min(num_examples, self.maximum or num_examples) ** (1.0 / self.temperature)


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Text files of the `files_…` tasks or of one of TEXTS: .txt, .jsonl, .json, .csv, .tsv, .parquet or .tfrecord.

    All but .parquet may end in .gz, and all but .parquet and .tfrecord in .zst. Documents without text, invalid UTF-8 and
    halves of surrogate pairs are corrected and counted in the log.

    Attributes:
      train, validation: file patterns, separated by commas, such as "corpus/*.txt". The suffix gives the file type. Without
        `validation` there is no evaluation.
      text_key: field of a .jsonl line, TFRecord example or row of a table that holds the text.
      lines_per_document: number of non-empty lines of a .txt file that make a document; blank lines are left out. None = each
        file is a document with its blank lines, and a longer file is divided at line ends, into documents of up to 65,536
        bytes.
      clean: f(document) -> text, such as @standardize. None = unchanged.
      rate: mixing rate, relative to the other texts of TEXTS.
    """

    train: str = ""
    validation: str = ""
    text_key: str = "text"
    lines_per_document: int | None = None
    clean: Callable | None = dataclasses.field(default=None, repr=False)
    rate: float = dataclasses.field(default=1.0, repr=False)  # not part of the text's identity

    def __post_init__(self):
        check_types(self)
        check_positive(self, "lines_per_document", "rate")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "validation") if self.validation else ("train",)


class NamedTasks(Protocol):
    """Tasks and mixtures that are created when a name is used, such as `t5x_lab.prompts.prompts.Prompts`."""

    def register(self, name: str) -> bool:
        """Registers the task or mixture of this name with SeqIO. Returns False for an unknown name."""
        ...

    def without(self, name: str, tasks: Iterable[str]) -> str:
        """Returns the name of the mixture without the data sets of these tasks, "" if there is none."""
        ...

    def names(self) -> Iterable[str]:
        """Returns names, to suggest one for a mistyped name."""
        ...


ALL_TEXTS = "texts"  # name of the mixture of all TEXTS


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data settings of a run.

    Attributes:
      mixture_or_task_name: a text ("c4", "sotu", "files", one of TEXTS), "texts" (all of TEXTS at their rates), a text with an
        objective ("sotu_span_corruption"), a prompted task or collection, or a SeqIO task or mixture of an imported module.
      task_feature_lengths: tokens of each feature, such as {"inputs": 512, "targets": 114}. Lengths that follow from the
        objective may be left out.
      batch_size: rows of a batch over all processes.
      batch_schedule: rows of a batch from given steps on, such as {10_000: 256, 20_000: 512}. Steps before the first of them
        have `batch_size` rows.
      vocabulary: vocabulary of the run. It replaces those of all tasks except `PassThroughVocabulary`.
      input_vocabulary: vocabulary of an encoder-decoder's inputs, if it differs from that of the targets. None = `vocabulary`.
        The model embeds the ids of both in one table.
      special_tokens: start, stop and padding ids.
      objective: objective for plain text: a name, an `Objective`, or None if task names contain it.
      mixing: mixing rates. None = the mixture's own.
      unique_tokens: number of tokens of text to repeat, the first of each shard (Raffel et al., section 3.4.2). Several texts
        share them in proportion to their rates. None = all.
      rates_of: unit of mixing rates: "examples", or "tokens", for which the mean length of each task's first 1,000 examples is
        computed.
      files: text files of `files`.
      texts: further text files, by name.
      prompts: prompted datasets and classification tasks.
      shards: number of logical shards of the data stream, fixed for a run. It must divide the batch size, and the number of
        processes must divide it. Then any number of processes reads the same examples.
      pack: whether several short examples share a row, with segment ids.
      converter: feature converter, such as `seqio.EncDecFeatureConverter()`. None = `FeatureConverter`. Other converters have
        their own setting for packing.
      shuffle_buffer_size: examples in the shuffle buffer of each task and shard. None = the task's own, SeqIO's 1,000 by
        default. With more than 16 tasks, the records of each are shuffled in an equal part of 16 such buffers, and the mixed
        examples in one.
      eval_steps: batches per task in an evaluation.
      split, eval_split: splits to train on and to evaluate the loss on. A task without `eval_split` is not evaluated.
      shuffle: whether training examples are shuffled. False reads each shard in file order.
      use_cached: whether tasks are read from SeqIO caches. Tasks that require a cache always are, tasks without a cache
        placeholder never.
      cache_dirs: folders of caches that `t5x_lab cache` or `seqio_cache_tasks` wrote.
    """

    mixture_or_task_name: str = dataclasses.field(metadata=macro("MIXTURE_OR_TASK_NAME"))
    task_feature_lengths: dict[str, int] = dataclasses.field(metadata=macro("TASK_FEATURE_LENGTHS"))
    batch_size: int = dataclasses.field(metadata=macro("BATCH_SIZE"))
    vocabulary: Vocabulary = dataclasses.field(metadata=macro("VOCABULARY"))
    batch_schedule: dict[int, int] = dataclasses.field(default_factory=dict, metadata=macro("BATCH_SCHEDULE"))
    input_vocabulary: Vocabulary | None = dataclasses.field(default=None, metadata=macro("INPUT_VOCABULARY"))
    special_tokens: SpecialTokens = SpecialTokens()
    objective: str | Objective | None = dataclasses.field(default=None, metadata=macro("OBJECTIVE"))
    mixing: Mixing | None = dataclasses.field(default=None, metadata=macro("MIXING"))
    unique_tokens: int | None = None
    rates_of: str = "examples"
    files: TextFiles = TextFiles()
    texts: dict[str, TextFiles] = dataclasses.field(default_factory=dict, metadata=macro("TEXTS"))
    prompts: NamedTasks | None = None
    shards: int = dataclasses.field(default=4, metadata=macro("DATA_SHARDS"))
    pack: bool = True
    converter: Converter | None = None
    shuffle_buffer_size: int | None = None
    eval_steps: int = 20
    split: str = "train"
    eval_split: str = "validation"
    shuffle: bool = True
    use_cached: bool = dataclasses.field(default=False, metadata=macro("USE_CACHED_TASKS"))
    cache_dirs: tuple = dataclasses.field(default=(), metadata=macro("CACHE_DIRS"))

    def __post_init__(self):
        check_types(self)
        check_positive(self, "batch_size", "shards", "shuffle_buffer_size", "eval_steps", "unique_tokens")
        for feature, length in self.task_feature_lengths.items():
            if not isinstance(length, int) or isinstance(length, bool) or length <= 0:
                raise UserError(f'TASK_FEATURE_LENGTHS["{feature}"] is {length!r}. It must be a number of tokens above zero.')
        for step, size in self.batch_schedule.items():
            if not all(isinstance(number, int) and number > 0 for number in (step, size)):
                raise UserError(
                    f"BATCH_SCHEDULE has {step!r}: {size!r}. It must map steps to numbers of rows, both above zero, such as "
                    "{10000: 256}."
                )
        for name, size in self.named_batch_sizes():
            if size % self.shards:
                raise UserError(
                    f"{name} is {size}, which is not a multiple of DATA_SHARDS={self.shards}. Every shard gives "
                    f"the same number of rows. Change one of them, for example --gin.DATA_SHARDS={_largest_divisor(self)}."
                )
        check_choice("DataConfig.rates_of", self.rates_of, ("examples", "tokens"))
        for name, text in self.texts.items():
            if not isinstance(text, TextFiles):
                raise UserError(f'TEXTS["{name}"] is {text!r}. It must be TextFiles, for example @{name}/TextFiles().')
            if name in (ALL_TEXTS, "files") or not re.fullmatch(r"[A-Za-z]\w*", name):
                raise UserError(
                    f'TEXTS has a text called "{name}". Use letters, digits and "_". The names "files" and "{ALL_TEXTS}" are '
                    "reserved."
                )
        if self.objective is not None:
            get_objective(self.objective)

    def batch_size_at(self, step: int) -> int:
        """Returns the rows of the batch of a step. The first step is 1."""
        begun = [first for first in self.batch_schedule if first <= step]
        return self.batch_schedule[max(begun)] if begun else self.batch_size

    def named_batch_sizes(self) -> list[tuple[str, int]]:
        """Returns BATCH_SIZE and those of BATCH_SCHEDULE, with their names for messages."""
        later = sorted(self.batch_schedule.items())
        return [("BATCH_SIZE", self.batch_size), *((f"BATCH_SCHEDULE[{step}]", size) for step, size in later)]

    def vocabulary_of(self, feature: str) -> Vocabulary:
        """Returns the vocabulary of a task's feature."""
        return self.input_vocabulary if self.input_vocabulary and feature.startswith("inputs") else self.vocabulary

    def identity(self) -> dict[str, str]:
        """Returns the settings that the saved position depends on. A run is resumed only with equal ones."""
        texts = (f"{name!r}: ({_identity(files)}, {files.rate})" for name, files in sorted(self.texts.items()))
        return {
            "MIXTURE_OR_TASK_NAME": self.mixture_or_task_name,
            "OBJECTIVE": stable_repr(self.objective),
            "MIXING": str(self.mixing),
            "TASK_FEATURE_LENGTHS": str(dict(sorted(self.task_feature_lengths.items()))),
            "DATA_SHARDS": str(self.shards),
            "VOCABULARY": str(self.vocabulary),
            "INPUT_VOCABULARY": str(self.input_vocabulary),
            "SpecialTokens.input_start": str(self.special_tokens.input_start),
            "DataConfig.unique_tokens": str(self.unique_tokens),
            "DataConfig.pack": str(self.pack),
            "DataConfig.converter": stable_repr(self.converter),
            "DataConfig.shuffle_buffer_size": str(self.shuffle_buffer_size),
            "DataConfig.split": self.split,
            "DataConfig.shuffle": str(self.shuffle),
            "USE_CACHED_TASKS": str(self.use_cached),
            "TextFiles": _identity(self.files),
            "TEXTS": "{" + ", ".join(texts) + "}",
            "DataConfig.rates_of": self.rates_of,
            "Prompts": stable_repr(self.prompts),
        }


def _identity(files: TextFiles) -> str:
    return f"{files}{f', cleaned by {stable_repr(files.clean)}' if files.clean else ''}"


def stable_repr(value: object) -> str:
    """Returns a value's text without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _largest_divisor(config: DataConfig) -> int:
    divisor = math.gcd(*(size for _, size in config.named_batch_sizes()))
    return max(n for n in range(1, config.shards + 1) if divisor % n == 0)
