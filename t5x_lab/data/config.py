"""What gin says about data, as plain dataclasses: nothing here imports TensorFlow or opens a file."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import UserError, one_of
from t5x_lab.config.macros import macro
from t5x_lab.data.converter import Converter
from t5x_lab.data.objective import Objective
from t5x_lab.data.objectives import get_objective

T5_SENTINELS = 100


@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary:
    """A SentencePiece model file; `extra_ids` sentinels are added behind its pieces (T5: 32,000 + 100).

    Attributes:
      path: of the model, here or wherever `etils.epath` reaches.
      extra_ids: their number. With 0 they are the pieces called `<extra_id_0>` and so on, as mT5's; a model without such pieces
        has none.
    """

    path: str = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
    extra_ids: int = 100

    def __post_init__(self):
        check_types(self)
        in_range(self, "extra_ids", 0, 10_000)


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """UTF-8 bytes, 3 special ids and `extra_ids` sentinels; needs no file.

    Attributes:
      extra_ids: their number. With 0 they are the last 100 bytes, as those of ByT5 were in its pre-training (Xue et al. 2022).
    """

    extra_ids: int = 100

    def __post_init__(self):
        check_types(self)
        in_range(self, "extra_ids", 0, 10_000)


@dataclasses.dataclass(frozen=True)
class HuggingFaceVocabulary:
    """A tokenizer of any kind, in a directory that `transformers` saved; slower in a training's pipeline than the others.

    Attributes:
      path: the directory; or a tokenizer.json alone, or a directory with GPT-1's encoder_bpe_40000.json and vocab_40000.bpe as
        OpenAI published them.
    """

    path: str

    def __post_init__(self):
        check_types(self)


Vocabulary = SentencePieceVocabulary | ByteVocabulary | HuggingFaceVocabulary


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids beside those of text, as the model was trained with them; T5's by default.

    Attributes:
      start: what a decoder reads first. None = nothing of its own: it reads the first token of a text, and does not predict
        it (as Qwen's do).
      end: what ends a text that is written; None = the vocabulary's end token. Of several (Llama 3's), any does. Behind texts
        that are read is the vocabulary's, or else the first of these.
      padding: of arrays of ids.
      input_start: ids before a text given as an input, behind a decoder's start token (as a BERT tokenizer's [CLS]).
      input_eos: whether inputs end with an end token; None = as the task says.
      input_end: which one, if not the one that ends texts (as a BERT tokenizer's [SEP]).
    """

    start: int | None = 0
    end: int | tuple[int, ...] | None = None
    padding: int = 0
    input_start: tuple[int, ...] = ()
    input_eos: bool | None = None
    input_end: tuple[int, ...] | None = None

    def before_texts(self, eos_id: int) -> int:
        """What a decoder reads before a text in training: where there is no start token, the end token of the text before."""
        return next(i for i in (self.start, *self.ends, eos_id) if i is not None)

    @property
    def ends(self) -> tuple[int, ...]:
        """What ends a text; none where that is the vocabulary's."""
        return () if self.end is None else (self.end,) if isinstance(self.end, int) else self.end

    def __post_init__(self):
        check_types(self)
        for name in ("start", "end", "padding", "input_start", "input_end"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value or 0,), default=0) < 0:
                raise UserError(f"SpecialTokens.{name} is {getattr(self, name)}; it is an id, or None where that may be.")


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Rates of a mixture's tasks from their numbers of training examples (Raffel et al., section 3.5.2), not its own.

    With e_m examples in task m, r_m = min(e_m, K) ** (1 / T), divided by their sum.

    Attributes:
      maximum: K, the artificial limit; None = no limit.
      temperature: T; 1 is examples-proportional mixing.
      equal: all rates alike, whatever the numbers are.
      num_examples: numbers by task, where a task does not know its own or another one is wanted (T5 counts 710,000 examples
        of unlabelled text for its small model).
    """

    maximum: int | None = None
    temperature: float = 1.0
    equal: bool = False
    num_examples: dict[str, int] | None = None

    def __post_init__(self):
        check_types(self)
        positive(self, "maximum", "temperature")

    def rate(self, num_examples: int) -> float:
        """r_m before it is divided by the sum."""
        return 1.0 if self.equal else min(num_examples, self.maximum or num_examples) ** (1.0 / self.temperature)


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The text behind the `files_…` tasks: patterns of .txt, .jsonl, .json, .parquet or .tfrecord files, joined by commas.

    All but .parquet may be gzipped, and lines be in .zst.

    Attributes:
      train, validation: such as "corpus/*.txt"; the kind is read off the end of the pattern. Without `validation` there
        is no evaluation.
      text_key: the field of a .jsonl line, TFRecord example or Parquet row that holds the text.
      lines_per_document: of .txt files: non-empty lines that make a document.
      clean: f(document) -> what is read of it, such as @standardize; None = all, as it is.
      rate: how often it is drawn from, relative to the other texts of TEXTS.
    """

    train: str = ""
    validation: str = ""
    text_key: str = "text"
    lines_per_document: int = 32
    clean: Callable | None = dataclasses.field(default=None, repr=False)
    rate: float = dataclasses.field(default=1.0, repr=False)  # it does not say which text it is

    def __post_init__(self):
        check_types(self)
        positive(self, "lines_per_document", "rate")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "validation") if self.validation else ("train",)


@runtime_checkable
class NamedTasks(Protocol):
    """Tasks and mixtures that are made when somebody asks for them by name, such as `t5x_lab.prompts.config.Prompts`."""

    def declare(self, name: str) -> bool:
        """Puts what the name stands for into SeqIO's registries; False where it is none of its names."""
        ...

    def without(self, name: str, tasks: Iterable[str]) -> str:
        """The name of the same mixture without the data sets of these tasks, whose data are missing; "" where there is none."""
        ...

    def names(self) -> Iterable[str]:
        """Some of the names, with which a mistyped one is compared."""
        ...


ALL_TEXTS = "texts"  # the name of those of TEXTS together


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which examples, cut how, in which order.

    Attributes:
      mixture_or_task_name: a text ("c4", "sotu", "files", one of TEXTS), "texts" (all of TEXTS, at their rates), a text with
        its objective ("sotu_span_corruption"), or a task or mixture registered with SeqIO by an imported module.
      task_feature_lengths: tokens per feature, such as {"inputs": 512, "targets": 114}; what an objective leaves no choice
        about may be left out.
      batch_size: rows of a batch over all processes.
      vocabulary: for t5x_lab's own tasks, and for text given to a trained model.
      special_tokens: what decoders read first, and what ends texts.
      objective: what is made of plain text: a name, an `Objective`, or None where the tasks' names say it.
      mixing: rates of a mixture's tasks; None = the mixture's own.
      unique_tokens: train on N tokens of text, the first of each shard's part, over and over (Raffel et al., section 3.4.2);
        None = all.
      rates_of: what the rates of a mixture, and of TEXTS, are shares of: "examples", or "tokens", for which the mean length of
        each task's examples is measured on the first 1,000.
      files: the text behind `files`.
      texts: more of them, by name.
      prompts: data sets of labelled records in words, by name.
      shards: logical shards of the stream, fixed for a run's life; the batch size is a multiple of it and the number of
        processes divides it, so that another number of processes reads the same examples.
      pack: several short examples in one row, told apart by segment ids.
      converter: what makes a model's features of examples, such as `seqio.EncDecFeatureConverter()`; None = the one of the
        architecture, see `FeatureConverter`. With one of your own, `pack` is its own setting.
      shuffle_buffer_size: examples of a task held for shuffling, in each shard; None = the task's own number, SeqIO's 1,000 by
        default. Of more than 16 tasks one such buffer holds what was mixed.
      eval_steps: batches per task in an evaluation.
      split, eval_split: of the tasks, to train on and to evaluate the loss on; a task without the latter is not evaluated.
      shuffle: whether training examples are; False reads each shard in the order of its files.
      use_cached: whether tasks are read from SeqIO's caches; those that require it always are, those that have no
        placeholder for it never.
      cache_dirs: folders of caches, as `t5x_lab cache` and `seqio_cache_tasks` write them.
    """

    mixture_or_task_name: str = dataclasses.field(metadata=macro("MIXTURE_OR_TASK_NAME"))
    task_feature_lengths: dict[str, int] = dataclasses.field(metadata=macro("TASK_FEATURE_LENGTHS"))
    batch_size: int = dataclasses.field(metadata=macro("BATCH_SIZE"))
    vocabulary: Vocabulary = dataclasses.field(metadata=macro("VOCABULARY"))
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
        positive(self, "batch_size", "shards", "shuffle_buffer_size", "eval_steps", "unique_tokens")
        for feature, length in self.task_feature_lengths.items():
            if not isinstance(length, int) or isinstance(length, bool) or length <= 0:
                raise UserError(f'TASK_FEATURE_LENGTHS["{feature}"] is {length!r}; it must be a number of tokens above zero.')
        if self.batch_size % self.shards:
            raise UserError(
                f"BATCH_SIZE is {self.batch_size}, which DATA_SHARDS={self.shards} does not divide; every shard gives the "
                f"same number of rows. Change one of them, for example --gin.DATA_SHARDS={_largest_divisor(self)}."
            )
        one_of("DataConfig.rates_of", self.rates_of, ("examples", "tokens"))
        for name, text in self.texts.items():
            if not isinstance(text, TextFiles):
                raise UserError(f'TEXTS["{name}"] is {text!r}; it must be TextFiles, for example @{name}/TextFiles().')
            if name in (ALL_TEXTS, "files") or not re.fullmatch(r"[A-Za-z]\w*", name):
                raise UserError(
                    f'TEXTS has a text called "{name}". Call it otherwise: with letters, digits and "_", and neither "files" '
                    f'nor "{ALL_TEXTS}", which is the name of all of them.'
                )
        if self.objective is not None:
            get_objective(self.objective)

    def identity(self) -> dict[str, str]:
        """What the position in the data means something for: a checkpoint is continued with these unchanged."""
        texts = (f"{name!r}: ({_identity(files)}, {files.rate})" for name, files in sorted(self.texts.items()))
        return {
            "MIXTURE_OR_TASK_NAME": self.mixture_or_task_name,
            "OBJECTIVE": by_name(self.objective),
            "MIXING": str(self.mixing),
            "TASK_FEATURE_LENGTHS": str(dict(sorted(self.task_feature_lengths.items()))),
            "BATCH_SIZE": str(self.batch_size),
            "DATA_SHARDS": str(self.shards),
            "VOCABULARY": str(self.vocabulary),
            "SpecialTokens.input_start": str(self.special_tokens.input_start),
            "DataConfig.unique_tokens": str(self.unique_tokens),
            "DataConfig.pack": str(self.pack),
            "DataConfig.converter": by_name(self.converter),
            "DataConfig.shuffle_buffer_size": str(self.shuffle_buffer_size),
            "DataConfig.split": self.split,
            "DataConfig.shuffle": str(self.shuffle),
            "USE_CACHED_TASKS": str(self.use_cached),
            "TextFiles": _identity(self.files),
            "TEXTS": "{" + ", ".join(texts) + "}",
            "DataConfig.rates_of": self.rates_of,
            "Prompts": by_name(self.prompts),
        }


def _identity(files: TextFiles) -> str:
    return f"{files}{f', cleaned by {by_name(files.clean)}' if files.clean else ''}"


def by_name(value: object) -> str:
    """Functions and objects by their names, not by where they lie in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _largest_divisor(config: DataConfig) -> int:
    return max(n for n in range(1, config.shards + 1) if config.batch_size % n == 0)
