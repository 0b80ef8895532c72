"""Text files as SeqIO sources: .txt, .jsonl and TFRecord, gzipped or not. Every element is {"text": a document}.

No Python generators: the state of a tf.data iterator over one cannot be saved, and resuming would not be exact.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import flag
from t5x_lab.data.config import TextFiles

UNEVEN = 0.02  # by which the shards of a text may differ
TOGETHER = 128  # documents that are read and parsed at a time


def text_files(config: TextFiles) -> seqio.FileDataSource:
    """The source of the text `files`.

    Raises:
      UserError: when no pattern is given, nothing matches, or the kind is unknown.
    """
    if not config.train:
        raise UserError(
            f'The text "files" is your own: say where with {flag("TextFiles.train", "FOLDER/*.txt")} (or .jsonl, .tfrecord).'
        )
    patterns = {"train": config.train} | ({"validation": config.validation} if config.validation else {})
    files = {split: _matching(pattern, split) for split, pattern in patterns.items()}
    kinds = {_kind(file) for names in files.values() for file in names}
    if len(kinds) != 1:
        raise UserError(f"TextFiles names files of several kinds ({', '.join(sorted(kinds))}); give files of one kind.")
    return document_files(files, kinds.pop(), config.text_key, config.lines_per_document)


def document_files(
    files: Mapping[str, Iterable[str]], kind: str = "txt", text_key: str = "text", lines_per_document: int = 32
) -> "DocumentFiles":
    """A source over files of one kind, by split; it counts its documents when it is asked how many there are."""
    read, parse = {
        "txt": (lambda file: _groups_of_lines(file, lines_per_document), lambda texts: texts),
        "jsonl": (_full_lines, lambda lines: _texts_of_json(lines, text_key)),
        "tfrecord": (_records, lambda records: _texts_of_examples(records, text_key)),
    }[kind]
    return DocumentFiles(read, parse, {split: list(names) for split, names in files.items()})


class DocumentFiles(seqio.FileDataSource):
    """Files of documents, split among any number of shards before they are parsed.

    Many are read and parsed at a time: a call of a function for each would cost more than its work.

    Args:
      read: a file's name -> a dataset of string [n], documents as they are written.
      parse: string [n], these -> string [n], their texts.
      files: by split.
    """

    def __init__(self, read: Callable, parse: Callable, files: Mapping[str, list[str]]):
        super().__init__(read, files, block_length=1)
        self._parse = parse

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        by_files = shard_info is not None and files_are_alike(self.list_shards(split), shard_info.num_shards)
        written = super().get_dataset(split, shuffle, seed, shard_info if by_files else None)
        if shard_info is not None and not by_files:
            written = written.unbatch().shard(shard_info.num_shards, shard_info.index).batch(TOGETHER)
        return written.map(lambda documents: {"text": self._parse(documents)}).unbatch()

    @functools.cache  # noqa: B019  (sources live as long as the process)
    def num_input_examples(self, split: str) -> int:
        written = super().get_dataset(split, shuffle=False)
        return int(written.reduce(np.int64(0), lambda count, documents: count + tf.size(documents, tf.int64)))


def files_are_alike(files: Sequence[str], shards: int) -> bool:
    """Whether shards of whole files are equal within 2 %, by bytes."""
    if len(files) % shards:
        return False
    try:
        sizes = np.array([tf.io.gfile.stat(file).length for file in files])
    except tf.errors.OpError:  # names that are not files'
        return False
    of_shards = np.array([sizes[shard::shards].sum() for shard in range(shards)])
    return bool(np.ptp(of_shards) <= UNEVEN * of_shards.mean())


def _compression(file) -> tf.Tensor:
    return tf.where(tf.strings.regex_full_match(file, r".*\.gz"), "GZIP", "")


def _full_lines(file) -> tf.data.Dataset:
    lines = tf.data.TextLineDataset(file, _compression(file)).batch(TOGETHER)
    return lines.map(lambda lines: tf.boolean_mask(lines, tf.strings.length(tf.strings.strip(lines)) > 0))


def _groups_of_lines(file, lines_per_document: int) -> tf.data.Dataset:
    groups = _full_lines(file).unbatch().batch(lines_per_document)
    return groups.map(lambda lines: tf.strings.reduce_join(lines, separator="\n")).batch(TOGETHER)


def _records(file) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(file, _compression(file)).batch(TOGETHER)


def _texts_of_json(lines: tf.Tensor, text_key: str) -> tf.Tensor:
    def texts(lines: np.ndarray) -> np.ndarray:
        return np.array([text(line) for line in lines], object)

    def text(line: bytes) -> bytes:
        try:
            return json.loads(line)[text_key].encode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'A line of your .jsonl files is not an object with a text under "{text_key}": {line[:80]!r} ({error!r}). '
                "Correct the line, or name the field with --gin.TextFiles.text_key=NAME."
            ) from error

    return tf.ensure_shape(tf.numpy_function(texts, [lines], tf.string, stateful=False), (None,))


def _texts_of_examples(records: tf.Tensor, text_key: str) -> tf.Tensor:
    return tf.io.parse_example(records, {text_key: tf.io.FixedLenFeature([], tf.string)})[text_key]


def _matching(pattern: str, split: str) -> list[str]:
    files = sorted(file for part in pattern.split(",") for file in tf.io.gfile.glob(part.strip()))
    if not files:
        raise NotHere(f'No file matches TextFiles.{split} = "{pattern}". Give a pattern such as "corpus/*.txt".')
    return files


def _kind(file: str) -> str:
    name = file.removesuffix(".gz")
    if ".tfrecord" in name:
        return "tfrecord"
    for kind, ends in (("txt", ".txt"), ("jsonl", (".jsonl", ".json"))):
        if name.endswith(ends):
            return kind
    raise UserError(f"{file} is of no kind that can be read; give .txt, .jsonl, .json or .tfrecord files, gzipped or not.")
