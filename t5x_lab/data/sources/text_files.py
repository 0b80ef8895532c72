"""Text files as SeqIO sources: .txt, .jsonl, TFRecord and Parquet, compressed or not. Elements are {"text": document}.

Python generators are not used: the state of a tf.data iterator over a generator cannot be saved, so a run could not be resumed
exactly.
"""

import functools
import io
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.user_code import call_user_code
from t5x_lab.data.config import TextFiles, stable_repr
from t5x_lab.data.sources.sharding import (
    can_split_by_bytes,
    file_sizes,
    have_equal_shards,
    longest_record_bytes,
    read_file_shares,
)

READ_BATCH = 128  # documents that are read and parsed at a time
MAX_OPEN_FILES = 256  # open files of formats that TensorFlow does not read; the least recently used one is closed


def text_files(config: TextFiles, name: str = "files") -> seqio.FileDataSource:
    """Returns the source of the text `files` or of one of TEXTS.

    Raises:
      UserError: if the pattern is missing, matches no file, or has an unknown file type.
    """
    scope = "" if name == "files" else f"{name}/"
    if not config.train:
        example = gin_flag(f"{scope}TextFiles.train", "FOLDER/*.txt")
        raise UserError(f'The text "{name}" needs your files. Set {example} (or .jsonl, .parquet, .tfrecord).')
    patterns = {"train": config.train} | ({"validation": config.validation} if config.validation else {})
    files = {split: _match_files(pattern, f"{scope}TextFiles.{split}") for split, pattern in patterns.items()}
    types = {_file_type(file) for names in files.values() for file in names}
    if len(types) != 1:
        raise UserError(f"{scope}TextFiles has files of several types ({', '.join(sorted(types))}). Use files of one type.")
    return document_files(files, types.pop(), config.text_key, config.lines_per_document, config.clean)


def document_files(
    files: Mapping[str, Iterable[str]],
    file_type: str = "txt",
    text_key: str = "text",
    lines_per_document: int = 32,
    clean: Callable[[str], str] | None = None,
) -> "DocumentFiles":
    """Returns a source of files of one type. Documents are counted when their number is needed.

    Args:
      files: file names by split.
      file_type: "txt", "jsonl", "parquet", "tfrecord", "txt.zst" or "jsonl.zst".
      text_key: field with the text.
      lines_per_document: number of non-empty lines of a .txt file that make a document.
      clean: f(document) -> text. None = unchanged.
    """
    unchanged = lambda texts: texts
    read, parse = {
        "txt": (lambda file: _group_lines(_read_lines(file), lines_per_document), unchanged),
        "txt.zst": (lambda file: _group_lines(resumable_reader(_read_zst_lines)(file), lines_per_document), unchanged),
        "jsonl": (lambda file: _drop_empty(_read_lines(file)), lambda lines: _parse_json(lines, text_key)),
        "jsonl.zst": (
            lambda file: _drop_empty(resumable_reader(_read_zst_lines)(file)),
            lambda lines: _parse_json(lines, text_key),
        ),
        "parquet": (resumable_reader(functools.partial(_read_parquet, text_key=text_key)), unchanged),
        "tfrecord": (_read_tfrecord, lambda records: _parse_tfrecord(records, text_key)),
    }[file_type]
    format_id = f"{file_type} {lines_per_document}"
    files_by_split = {split: list(names) for split, names in files.items()}
    if clean is None:
        return DocumentFiles(read, parse, files_by_split, format_id)
    parse_and_clean = lambda raw: _clean_texts(parse(raw), clean)
    return DocumentFiles(read, parse_and_clean, files_by_split, f"{format_id} {stable_repr(clean)}")


def _clean_texts(texts: tf.Tensor, clean: Callable[[str], str]) -> tf.Tensor:
    def clean_all(documents: np.ndarray) -> np.ndarray:
        call = lambda text: call_user_code("TextFiles.clean fails", lambda: clean(text.decode("utf-8", "replace")))
        cleaned = [call(text) for text in documents]
        if invalid := [text for text in cleaned if not isinstance(text, str)]:
            raise UserError(f"TextFiles.clean returned {invalid[0]!r}. It must return a text.")
        return np.array([text.encode() for text in cleaned], object)

    return tf.ensure_shape(tf.numpy_function(clean_all, [texts], tf.string, stateful=False), [None])


class DocumentFiles(seqio.FileDataSource):
    """Source of files of documents, which can be divided among any number of shards before they are parsed.

    Documents are read and parsed in batches, since a function call per document would cost more than its work.

    Args:
      read: f(file name) -> dataset of string [n], raw documents.
      parse: f(string [n], raw documents) -> string [n], texts.
      files: file names by split.
      format_id: distinguishes sources that make other documents of the same files.
    """

    def __init__(self, read: Callable, parse: Callable, files: Mapping[str, list[str]], format_id: str):
        super().__init__(read, files, block_length=1)
        self._parse, self._format_id = parse, format_id

    must_read_to_count = True

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        files = self.list_shards(split)
        sizes = file_sizes(files) if shard_info else []
        if shard_info is None or have_equal_shards(sizes, shard_info.num_shards):
            raw = super().get_dataset(split, shuffle, seed, shard_info)
        elif can_split_by_bytes(sizes, shard_info.num_shards, lambda: longest_record_bytes(self._reader, files, sizes)):
            order_seed = seed if shuffle else None
            raw = read_file_shares(self._reader, files, sizes, shard_info, order_seed, READ_BATCH, batched=True)
        else:
            whole = super().get_dataset(split, shuffle, seed, None)
            raw = whole.unbatch().shard(shard_info.num_shards, shard_info.index).batch(READ_BATCH)
        return raw.map(lambda documents: {"text": self._parse(documents)}).unbatch()

    def num_input_examples(self, split: str) -> int:
        """Returns the number of documents, counted by reading them unless `document_counts` has it."""
        files = self.list_shards(split)
        key = f"{zlib.crc32(json.dumps([files, file_sizes(files), self._format_id]).encode()):08x}"
        if key not in document_counts:
            raw = super().get_dataset(split, shuffle=False)
            document_counts[key] = int(raw.reduce(np.int64(0), lambda count, documents: count + tf.size(documents, tf.int64)))
        return document_counts[key]


document_counts: dict[str, int] = {}  # number of documents by hash of their files; checkpoints store it


def must_read_to_count(source: seqio.DataSource) -> bool:
    """Returns whether counting the source's examples may take long."""
    return getattr(getattr(source, "source", source), "is_counted_by_reading", False)


def compression_type(file) -> tf.Tensor:
    return tf.where(tf.strings.regex_full_match(file, r".*\.gz"), "GZIP", "")


def _read_lines(file) -> tf.data.Dataset:
    return tf.data.TextLineDataset(file, compression_type(file)).batch(READ_BATCH)


def _drop_empty(lines: tf.data.Dataset) -> tf.data.Dataset:
    return lines.map(lambda lines: tf.boolean_mask(lines, tf.strings.length(tf.strings.strip(lines)) > 0))


def _group_lines(lines: tf.data.Dataset, lines_per_document: int) -> tf.data.Dataset:
    groups = _drop_empty(lines).unbatch().batch(lines_per_document)
    return groups.map(lambda lines: tf.strings.reduce_join(lines, separator="\n")).batch(READ_BATCH)


def _read_tfrecord(file) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(file, compression_type(file)).batch(READ_BATCH)


class OpenedFile(tf.io.gfile.GFile):
    """File on any storage, with the interface that pyarrow needs."""

    closed = False
    readable = lambda self: True

    def __init__(self, name: str):
        super().__init__(name, "rb")


def _read_zst_lines(file: str) -> Iterator[list[bytes]]:
    with OpenedFile(file) as raw:
        lines = (line.rstrip(b"\r\n") for line in io.BufferedReader(pa.CompressedInputStream(raw, "zstd")))
        while batch := list(itertools.islice(lines, READ_BATCH)):
            yield batch


def _read_parquet(file: str, text_key: str) -> Iterator[list[bytes]]:
    with OpenedFile(file) as raw:
        table = pyarrow.parquet.ParquetFile(raw)
        if text_key not in table.schema_arrow.names:
            raise UserError(
                f'{file} has no column "{text_key}"; it has {", ".join(table.schema_arrow.names)}. Set the column with the '
                "text: --gin.TextFiles.text_key=NAME."
            )
        for rows in table.iter_batches(READ_BATCH, columns=[text_key]):
            yield [text or b"" for text in rows.column(0).cast(pa.binary()).to_pylist()]


def resumable_reader(read_chunks: Callable[[str], Iterator[list[bytes]]]) -> Callable[[str], tf.data.Dataset]:
    """Returns f(file) -> dataset of chunks, string [n], for formats that TensorFlow does not read.

    For TensorFlow a chunk is a function of the file and the chunk number, so that the saved position is a number. Files stay
    open after their last chunk. A chunk out of order is read from the start of the file.

    Args:
      read_chunks: f(file name) -> iterator of lists of raw documents.
    """
    readers: list[tuple[tuple[bytes, int], Iterator]] = []  # open readers and the chunk that they return next
    after_errors: set[tuple[bytes, int]] = set()  # TensorFlow reads on after an error, and would collect thousands
    lock = threading.Lock()

    def chunk(file: bytes, number: np.int64) -> np.ndarray:
        position, next_position = (file, int(number)), (file, int(number) + 1)
        if position in after_errors:
            return np.array([], object)
        with lock:
            index = next((i for i, (reader_position, _) in enumerate(readers) if reader_position == position), None)
            if index is not None:
                reader = readers.pop(index)[1]
            else:
                reader = itertools.islice(read_chunks(file.decode()), position[1], None)
        try:
            documents: list[bytes] = next(reader, [])
        except Exception:
            after_errors.add(next_position)
            raise
        after_errors.discard(next_position)
        if documents:
            with lock:
                readers.append((next_position, reader))
                del readers[:-MAX_OPEN_FILES]
        return np.array(documents, object)

    def dataset(file) -> tf.data.Dataset:
        read = lambda number: tf.ensure_shape(tf.numpy_function(chunk, [file, number], tf.string, stateful=False), [None])
        step = tf.autograph.experimental.do_not_convert(lambda state, number: (state, read(number)))
        chunks = tf.data.Dataset.counter().scan(0, step)  # a map might read several at once, each from the start
        return chunks.take_while(lambda texts: tf.size(texts) > 0)

    return dataset


@tf.autograph.experimental.do_not_convert  # AutoGraph would make the called Python many times slower
def _parse_json(lines: tf.Tensor, text_key: str) -> tf.Tensor:
    def texts(lines: np.ndarray) -> np.ndarray:
        return np.array([text(line) for line in lines], object)

    def text(line: bytes) -> bytes:
        try:
            return parse_json(line)[text_key].encode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'A line of your .jsonl files is not an object with a text under "{text_key}": {line[:80]!r} ({error!r}). '
                "Correct the line, or set the field with --gin.TextFiles.text_key=NAME."
            ) from error

    return tf.ensure_shape(tf.numpy_function(texts, [lines], tf.string, stateful=False), (None,))


def _parse_tfrecord(records: tf.Tensor, text_key: str) -> tf.Tensor:
    return tf.io.parse_example(records, {text_key: tf.io.FixedLenFeature([], tf.string)})[text_key]


def _match_files(pattern: str, setting: str) -> list[str]:
    files = sorted(file for part in pattern.split(",") for file in tf.io.gfile.glob(part.strip()))
    if not files:
        raise NotHere(f'No file matches {setting} = "{pattern}". Use a pattern such as "corpus/*.txt".')
    return files


_FILE_TYPES = {
    **{f".txt{packed}": "txt" for packed in ("", ".gz")},
    **{f".{json}{packed}": "jsonl" for json in ("jsonl", "json") for packed in ("", ".gz")},
    **{".txt.zst": "txt.zst", ".jsonl.zst": "jsonl.zst", ".json.zst": "jsonl.zst", ".parquet": "parquet"},
}


def _file_type(file: str) -> str:
    for suffix, file_type in _FILE_TYPES.items():
        if file.endswith(suffix):
            return file_type
    if ".tfrecord" in file and not file.endswith(".zst"):  # T5's files are called name.tfrecord-00000-of-01024
        return "tfrecord"
    raise UserError(
        f"{file} has an unsupported file type. Use .txt, .jsonl or .json files (or .gz or .zst of these), .parquet, or "
        ".tfrecord (or .gz)."
    )
