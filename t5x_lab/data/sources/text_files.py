"""Text files as SeqIO sources. Elements are {"text": document}."""

import functools
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log_counted, log_once
from t5x_lab.config.user_code import call_user_code
from t5x_lab.data.config import TextFiles, stable_repr
from t5x_lab.data.sources.file_types import RECORD_KINDS, FileType, check_regular_files, common_file_type, read_lines
from t5x_lab.data.sources.resumable import READ_BATCH, Chunks, chunks_of, numbered_chunks, resumable_reader
from t5x_lab.data.sources.sharding import (
    can_split_by_bytes,
    file_sizes,
    have_equal_shards,
    longest_record_bytes,
    read_file_shares,
)
from t5x_lab.data.sources.storage import is_folder, list_matches, read_copies
from t5x_lab.data.sources.tables import open_parquet, read_rows, serialized_examples

# T5's objectives read a random part of 65,536 tokens of longer documents, which is never less of a text than these bytes.
MAX_FILE_DOCUMENT_BYTES = 1 << 16


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
    files = {split: match_files(pattern, f"{scope}TextFiles.{split}") for split, pattern in patterns.items()}
    names = [name for names in files.values() for name in names]
    file_type = common_file_type(names, ("txt", *RECORD_KINDS), f"{scope}TextFiles")
    if file_type.kind == "txt":
        log_once(_describe_documents(config, scope))
    return document_files(files, file_type, config.text_key, config.lines_per_document, config.clean)


def match_files(pattern: str, setting: str) -> list[str]:
    """Returns the files of patterns, which are separated by commas. `setting` is named in messages.

    Raises:
      UserError: if there are none, or one is a folder or a pipe.
    """
    files = sorted(file for part in pattern.split(",") for file in list_matches(part.strip()))
    if not files:
        raise NotHere(f'No file matches {setting} = "{pattern}". Use a pattern such as "corpus/*.txt".')
    folder = next((file for file in files if is_folder(file)), None)
    if folder:
        raise UserError(
            f'{setting} = "{pattern}" matches the folder {folder}. Use a pattern of files, such as "{folder}/*.txt".'
        )
    check_regular_files(files)
    return files


def _describe_documents(config: TextFiles, scope: str) -> str:
    if config.lines_per_document:
        return f"{config.lines_per_document:,} non-empty lines of {config.train} are a document."
    return (
        f"Each file of {config.train} is a document; longer files are divided at line ends, into documents of up to "
        f"{MAX_FILE_DOCUMENT_BYTES:,} bytes. {scope}TextFiles.lines_per_document sets a number of lines instead."
    )


def document_files(
    files: Mapping[str, Iterable[str]],
    file_type: FileType = FileType("txt"),
    text_key: str = "text",
    lines_per_document: int | None = None,
    clean: Callable[[str], str] | None = None,
) -> "DocumentFiles":
    """Returns a source of files of one type. Documents are counted when their number is needed.

    Args:
      files: file names by split.
      file_type: their type.
      text_key: field with the text.
      lines_per_document: number of non-empty lines of a .txt file that make a document. None = see `TextFiles`.
      clean: f(document) -> text. None = unchanged.
    """
    read = _reader(file_type, text_key, lines_per_document)
    read = read_copies(read, [*itertools.chain(*files.values())]) if file_type.kind == "tfrecord" else read
    to_value = functools.partial(_json_value, text_key=text_key) if file_type.kind in ("jsonl", "csv", "tsv") else None
    features = {text_key: tf.io.FixedLenFeature([], tf.string)}

    def parse(raw: tf.Tensor) -> tf.Tensor:
        raw = tf.io.parse_example(raw, features)[text_key] if file_type.kind == "tfrecord" else raw
        return _convert_texts(raw, to_value, clean)

    format_id = f"{file_type.kind} {lines_per_document}" + (f" {stable_repr(clean)}" if clean else "")
    return DocumentFiles(read, parse, {split: list(names) for split, names in files.items()}, format_id)


def _reader(file_type: FileType, text_key: str, lines_per_document: int | None) -> Callable[[Any], tf.data.Dataset]:
    """Returns f(file name) -> dataset of raw documents, string [n]: texts, JSON objects, or serialized TFRecord examples."""
    if file_type.kind == "tfrecord":
        return lambda file: serialized_examples(file, file_type).batch(READ_BATCH)
    if file_type.kind == "parquet":
        return resumable_reader(numbered_chunks(functools.partial(_read_parquet, text_key=text_key)))
    if file_type.kind in ("csv", "tsv"):
        return resumable_reader(numbered_chunks(lambda file: (json.dumps(row).encode() for row in read_rows(file, file_type))))
    return line_reader(file_type.compression, 1 if file_type.kind == "jsonl" else lines_per_document)


def line_reader(compression: str, lines_per_document: int | None) -> Callable[[Any], tf.data.Dataset]:
    """Returns f(file name) -> dataset of documents, string [n], of so many non-empty lines. None = whole files."""

    def read_chunks(file: str, position: int) -> Chunks:
        lines = read_lines(file, compression, position)
        return chunks_of(_join_lines(lines, lines_per_document) if lines_per_document else _join_file(lines, position))

    return resumable_reader(read_chunks)


def _join_lines(lines: Iterator[tuple[bytes, int]], lines_per_document: int) -> Iterator[tuple[bytes, int]]:
    """Yields (document, position after it) of every `lines_per_document` lines that are not blank."""
    filled = ((line, position) for line, position in lines if line.strip())
    while group := list(itertools.islice(filled, lines_per_document)):
        yield b"\n".join(line for line, _ in group), group[-1][1]


def _join_file(lines: Iterator[tuple[bytes, int]], position: int) -> Iterator[tuple[bytes, int]]:
    """Yields (document, position after it): the whole file, or parts of up to `MAX_FILE_DOCUMENT_BYTES` of it."""
    group: list[bytes] = []
    start = position
    for line, end in lines:
        if group and end - start > MAX_FILE_DOCUMENT_BYTES:
            yield b"\n".join(group), position
            group, start = [], position
        group.append(line)
        position = end
    if group:
        yield b"\n".join(group), position


def _read_parquet(file: str, text_key: str) -> Iterator[bytes]:
    with open_parquet(file) as table:
        names = table.schema_arrow.names
        if text_key not in names:
            raise UserError(
                f'{file} has no column "{text_key}"; it has {", ".join(names)}. Set the column with the text: '
                "--gin.TextFiles.text_key=NAME."
            )
        column_type = table.schema_arrow.field(text_key).type
        value_type = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
        if value_type not in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
            raise UserError(
                f'The column "{text_key}" of {file} has values of the type {value_type}, not texts. Set the column with the '
                "text: --gin.TextFiles.text_key=NAME."
            )
        for rows in table.iter_batches(READ_BATCH, columns=[text_key]):
            yield from (text or b"" for text in rows.column(0).cast(value_type).cast(pa.large_binary()).to_pylist())


def _json_value(raw: bytes, text_key: str) -> Any:
    try:
        return parse_json(raw)[text_key]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f'A record of your files is not an object with a text under "{text_key}": {raw[:80]!r} ({error!r}). Correct it, or '
            "set the field with --gin.TextFiles.text_key=NAME."
        ) from error


def _convert_texts(raw: tf.Tensor, to_value: Callable[[bytes], Any] | None, clean: Callable[[str], str] | None) -> tf.Tensor:
    """Returns the texts of raw documents, string [m], without those that have none."""

    @tf.autograph.experimental.do_not_convert  # AutoGraph would make the called Python many times slower
    def convert(documents: np.ndarray) -> np.ndarray:
        texts = (_to_text(to_value(document) if to_value else document) for document in documents)
        cleaned = (_clean_text(text, clean) if clean else text for text in texts if text)
        return np.array([text.encode() for text in cleaned], object)

    return tf.ensure_shape(tf.numpy_function(convert, [raw], tf.string, stateful=False), [None])


def _to_text(value: Any) -> str:
    """Returns the text of a document of any format.

    Texts of a crawl may be missing, empty, not UTF-8, or have half of a surrogate pair (JSON). They are corrected and counted.

    Raises:
      UserError: if the value is of another type.
    """
    if value is None or (isinstance(value, bytes | str) and not value.strip()):
        log_counted("A document of the text files has no text and is left out.")
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            log_counted("A document of the text files is not UTF-8. Invalid bytes are replaced by U+FFFD.")
            return value.decode(errors="replace")
    if not isinstance(value, str):
        raise UserError(f"A document is {value!r:.80} instead of a text. Set the field with the text: TextFiles.text_key.")
    if _SURROGATES.search(value):
        log_counted("A document of the text files has half of a surrogate pair, which is replaced by U+FFFD.")
        return _SURROGATES.sub("\ufffd", value)
    return value


_SURROGATES = re.compile("[\ud800-\udfff]")


def _clean_text(text: str, clean: Callable[[str], str]) -> str:
    cleaned = call_user_code("TextFiles.clean fails", lambda: clean(text))
    if not isinstance(cleaned, str):
        raise UserError(f"TextFiles.clean returned {cleaned!r}. It must return a text.")
    return cleaned


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

    must_read_to_count = reads_any_storage = True

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
    return getattr(getattr(source, "source", source), "must_read_to_count", False)
