"""What gin says about data, as plain dataclasses: nothing here imports TensorFlow or opens a file."""

import dataclasses

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary:
    """A SentencePiece model file; `extra_ids` sentinels are added behind its pieces (T5: 32,000 + 100)."""

    path: str = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
    extra_ids: int = 100

    def __post_init__(self):
        check_types(self)
        in_range(self, "extra_ids", 0, 10_000)


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """UTF-8 bytes, 3 special ids and `extra_ids` sentinels (ByT5); needs no file."""

    extra_ids: int = 100

    def __post_init__(self):
        check_types(self)
        in_range(self, "extra_ids", 0, 10_000)


Vocabulary = SentencePieceVocabulary | ByteVocabulary


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The text behind the `files_…` tasks: patterns of .txt, .jsonl or .tfrecord files, several joined by commas.

    Attributes:
      train, validation: such as "corpus/*.txt"; the kind is read off the end of the pattern. Without `validation` there
        is no evaluation.
      text_key: the field of a .jsonl line or TFRecord example that holds the text.
      lines_per_document: of .txt files: so many non-empty lines make a document.
    """

    train: str = ""
    validation: str = ""
    text_key: str = "text"
    lines_per_document: int = 32

    def __post_init__(self):
        check_types(self)
        positive(self, "lines_per_document")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which examples, cut how, in which order.

    Attributes:
      mixture_or_task_name: a task or mixture: one of t5x_lab's, or registered with SeqIO by an imported module.
      task_feature_lengths: tokens per feature, such as {"inputs": 512, "targets": 114}.
      batch_size: rows of a batch over all processes.
      vocabulary: for t5x_lab's own tasks, and for text given to a trained model.
      files: the text behind `files_…` tasks.
      shards: logical shards of the stream, fixed for a run's life; the batch size is a multiple of it and the number of
        processes divides it, so that another number of processes reads the same examples.
      pack: several short examples in one row, told apart by segment ids.
      shuffle_buffer_size: examples held for shuffling, per shard.
      eval_steps: batches per task in an evaluation.
    """

    mixture_or_task_name: str
    task_feature_lengths: dict[str, int]
    batch_size: int
    vocabulary: Vocabulary
    files: TextFiles = TextFiles()
    shards: int = 4
    pack: bool = True
    shuffle_buffer_size: int = 1000
    eval_steps: int = 20

    def __post_init__(self):
        check_types(self)
        positive(self, "batch_size", "shards", "shuffle_buffer_size", "eval_steps")
        for feature, length in self.task_feature_lengths.items():
            if not isinstance(length, int) or isinstance(length, bool) or length <= 0:
                raise UserError(f'TASK_FEATURE_LENGTHS["{feature}"] is {length!r}; it must be a number of tokens above zero.')
        if self.batch_size % self.shards:
            raise UserError(
                f"BATCH_SIZE is {self.batch_size}, which DATA_SHARDS={self.shards} does not divide; every shard gives the "
                f"same number of rows. Change one of them, for example --gin.DATA_SHARDS={_largest_divisor(self)}."
            )

    def model_lengths(self, has_encoder: bool) -> tuple[int, int]:
        """Tokens of a row for the encoder (0 without one) and for the decoder, which without an encoder reads both.

        Told from the task's name, without opening it; a decoder's language-modelling tasks have targets alone.
        """
        inputs, targets = (self.task_feature_lengths.get(name, 0) for name in ("inputs", "targets"))
        if has_encoder:
            return inputs, targets
        targets_alone = any(name in self.mixture_or_task_name for name in ("prefix_lm_objective", "full_lm"))
        return 0, targets if targets_alone else inputs + targets

    def identity(self) -> dict[str, str]:
        """What the position in the data means something for: a checkpoint is continued with these unchanged."""
        return {
            "MIXTURE_OR_TASK_NAME": self.mixture_or_task_name,
            "TASK_FEATURE_LENGTHS": str(dict(sorted(self.task_feature_lengths.items()))),
            "BATCH_SIZE": str(self.batch_size),
            "DATA_SHARDS": str(self.shards),
            "VOCABULARY": str(self.vocabulary),
            "DataConfig.pack": str(self.pack),
            "DataConfig.shuffle_buffer_size": str(self.shuffle_buffer_size),
            "TextFiles": str(self.files),
        }


def _largest_divisor(config: DataConfig) -> int:
    return max(n for n in range(1, config.shards + 1) if config.batch_size % n == 0)
