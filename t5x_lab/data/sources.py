"""Text files as SeqIO sources: .txt, .jsonl, TFRecord and Parquet, compressed or not. Every element is {"text": a document}.

No Python generators: the state of a tf.data iterator over one cannot be saved, and resuming would not be exact.
"""

import bisect
import concurrent.futures
import copy
import functools
import io
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import flag
from t5x_lab.config.user_code import tried
from t5x_lab.data.config import TextFiles, by_name

FILES_LOOKED_AT = 16  # for the length of a text's records
UNEVEN = 0.02  # by which the shards of a text may differ
LARGE = 1 << 30  # bytes of a text: of a smaller one each shard reads all and keeps every n-th record
TOGETHER = 128  # documents that are read and parsed at a time
_PLACES = 1 << 32  # that a file's records are spread over, evenly wherever one stops
_SPREAD = 2_654_435_769  # 2**32 by the golden ratio (Knuth, volume 3, 6.4)
MOST_OPENED = 256  # files that TensorFlow does not read itself; those asked for longest ago are closed


def text_files(config: TextFiles, name: str = "files") -> seqio.FileDataSource:
    """The source of the text `files`, or of one of TEXTS.

    Raises:
      UserError: when no pattern is given, nothing matches, or the kind is unknown.
    """
    scope = "" if name == "files" else f"{name}/"
    if not config.train:
        where = flag(f"{scope}TextFiles.train", "FOLDER/*.txt")
        raise UserError(f'The text "{name}" is your own: say where with {where} (or .jsonl, .parquet, …).')
    patterns = {"train": config.train} | ({"validation": config.validation} if config.validation else {})
    files = {split: _matching(pattern, f"{scope}TextFiles.{split}") for split, pattern in patterns.items()}
    kinds = {_kind(file) for names in files.values() for file in names}
    if len(kinds) != 1:
        raise UserError(f"{scope}TextFiles names files of several kinds ({', '.join(sorted(kinds))}); give files of one kind.")
    return document_files(files, kinds.pop(), config.text_key, config.lines_per_document, config.clean)


def document_files(
    files: Mapping[str, Iterable[str]],
    kind: str = "txt",
    text_key: str = "text",
    lines_per_document: int = 32,
    clean: Callable[[str], str] | None = None,
) -> "DocumentFiles":
    """A source over files of one kind, by split; it counts its documents when it is asked how many there are."""
    as_they_are = lambda texts: texts
    read, parse = {
        "txt": (lambda file: _groups_of_lines(_lines(file), lines_per_document), as_they_are),
        "txt.zst": (lambda file: _groups_of_lines(read_on(_lines_of_zst)(file), lines_per_document), as_they_are),
        "jsonl": (lambda file: _full(_lines(file)), lambda lines: _texts_of_json(lines, text_key)),
        "jsonl.zst": (lambda file: _full(read_on(_lines_of_zst)(file)), lambda lines: _texts_of_json(lines, text_key)),
        "parquet": (read_on(functools.partial(_texts_of_parquet, text_key=text_key)), as_they_are),
        "tfrecord": (_records, lambda records: _texts_of_examples(records, text_key)),
    }[kind]
    cut = f"{kind} {lines_per_document}"
    if clean is None:
        return DocumentFiles(read, parse, {split: list(names) for split, names in files.items()}, cut)
    cleaned = lambda written: _cleaned(parse(written), clean)
    return DocumentFiles(read, cleaned, {split: list(names) for split, names in files.items()}, f"{cut} {by_name(clean)}")


def _cleaned(texts: tf.Tensor, clean: Callable[[str], str]) -> tf.Tensor:
    def of_all(documents: np.ndarray) -> np.ndarray:
        found = [tried("TextFiles.clean fails", lambda text=text: clean(text.decode("utf-8", "replace"))) for text in documents]
        if wrong := [text for text in found if not isinstance(text, str)]:
            raise UserError(f"TextFiles.clean gives {wrong[0]!r}; it gives a text.")
        return np.array([text.encode() for text in found], object)

    return tf.ensure_shape(tf.numpy_function(of_all, [texts], tf.string, stateful=False), [None])


class DocumentFiles(seqio.FileDataSource):
    """Files of documents, split among any number of shards before they are parsed.

    Many are read and parsed at a time: a call of a function for each would cost more than its work.

    Args:
      read: a file's name -> a dataset of string [n], documents as they are written.
      parse: string [n], these -> string [n], their texts.
      files: by split.
      cut: what tells readers of the same files apart that make other documents of them.
    """

    def __init__(self, read: Callable, parse: Callable, files: Mapping[str, list[str]], cut: str):
        super().__init__(read, files, block_length=1)
        self._parse, self._cut = parse, cut

    is_counted_by_reading = True

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        files = self.list_shards(split)
        sizes = sizes_of(files) if shard_info else []
        if shard_info is None or files_are_alike(sizes, shard_info.num_shards):
            written = super().get_dataset(split, shuffle, seed, shard_info)
        elif can_be_shared(sizes, shard_info.num_shards, lambda: longest_records(self._reader, files, sizes)):
            written = shares_of_files(self._reader, files, sizes, shard_info, seed if shuffle else None, TOGETHER, batched=True)
        else:
            whole = super().get_dataset(split, shuffle, seed, None)
            written = whole.unbatch().shard(shard_info.num_shards, shard_info.index).batch(TOGETHER)
        return written.map(lambda documents: {"text": self._parse(documents)}).unbatch()

    def num_input_examples(self, split: str) -> int:
        """Counted by reading all of them, where `counted` does not have it."""
        files = self.list_shards(split)
        key = f"{zlib.crc32(json.dumps([files, sizes_of(files), self._cut]).encode()):08x}"
        if key not in counted:
            written = super().get_dataset(split, shuffle=False)
            counted[key] = int(written.reduce(np.int64(0), lambda count, documents: count + tf.size(documents, tf.int64)))
        return counted[key]


counted: dict[str, int] = {}  # documents by what tells their files apart; a run keeps it


def is_counted_by_reading(source: seqio.DataSource) -> bool:
    """Whether asking for the number of its examples may take long."""
    return getattr(getattr(source, "source", source), "is_counted_by_reading", False)


def of_file(source: seqio.FileDataSource, split: str, file: str) -> seqio.FileDataSource:
    """The same source with one of its files."""
    one = copy.copy(source)
    one.list_shards = lambda split: [file]  # type: ignore[method-assign]  # its name may look like a pattern
    return one


def sizes_of(files: Sequence[str]) -> list[int | None]:
    """Bytes of each; None of what is no file."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(_size, files))


def _size(file: str) -> int | None:
    try:
        return tf.io.gfile.stat(file).length
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        return None  # any other fault of storage is told: another shard might not meet it, and split the text otherwise


def files_are_alike(sizes: Sequence[int | None], shards: int) -> bool:
    """Whether shards of whole files of these bytes are equal within 2 %."""
    if not sizes or len(sizes) % shards or None in sizes:  # None are names that are not files'
        return False
    of_shards = np.array([sum(sizes[shard::shards]) for shard in range(shards)])  # type: ignore[arg-type]
    return bool(np.ptp(of_shards) <= UNEVEN * of_shards.mean())


def can_be_shared(sizes: Sequence[int | None], shards: int, longest: Callable[[], float]) -> bool:
    """Whether files are so large that no shard should read all of them to keep its part, and a share has enough records of
    them to be like the others; `longest` gives `longest_records`."""
    if not sizes or None in sizes or sum(sizes) < LARGE:  # type: ignore[arg-type]
        return False
    return longest() <= UNEVEN * sum(sizes) / shards  # type: ignore[arg-type]


def longest_records(read: Callable, files: Sequence[str], sizes: Sequence[int | None]) -> float:
    """Bytes of a record of that file, among some, whose records are the longest."""
    looked_at = {files[i * len(files) // FILES_LOOKED_AT] for i in range(min(FILES_LOOKED_AT, len(files)))}
    largest = files[int(np.argmax([size or 0 for size in sizes]))]
    return max(_mean_length(read, file) for file in (*looked_at, largest))


def _mean_length(read: Callable, file: str) -> float:
    """Bytes of a record, of the first ones of a file."""
    texts = [x for x in tf.nest.flatten(list(read(file).take(10).as_numpy_iterator())) if isinstance(x, bytes | np.ndarray)]
    lengths = [len(text) for x in texts for text in np.ravel(np.array(x, object))[:10] if isinstance(text, bytes)]
    return float(np.mean(lengths or [0]))


def shares_of_files(
    read: Callable,
    files: Sequence[str],
    sizes: Sequence[int | None],
    part: seqio.ShardInfo,
    seed: int | None,
    together: int = 1,
    batched: bool = False,
) -> tf.data.Dataset:
    """A shard's part of the bytes of all files, laid one after the other: some files whole, and of the first and last a share.

    A file that several shards read is shared by its records' numbers, so that each of them is in exactly one shard. Of 1,024
    files a thousand shards read two or three each.

    Args:
      read: a file's name -> a dataset of its records.
      files: names.
      sizes: their bytes.
      part: which of how many; its number may be a tensor.
      seed: of the order of files; None = as they are.
      together: records that are taken of a file before it is another one's turn.
      batched: whether `read` gives them so many at a time, [n, ...], and so does what is returned.
    """
    shares, first = _shares([size or 0 for size in sizes], part.num_shards)
    of_shard = tf.range(tf.gather(first, part.index), tf.gather(first, part.index + 1))
    mine = tf.data.Dataset.from_tensor_slices(tf.gather(shares, of_shard))
    mine = mine if seed is None else mine.shuffle(int(np.diff(first).max()), seed=seed)
    names = tf.constant(list(files))

    def is_mine(numbers: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        place = numbers * _SPREAD % _PLACES
        return (place >= share[1]) & (place < share[2])

    def of_file(share: tf.Tensor) -> tf.data.Dataset:
        records = read(names[share[0]])
        if not batched:
            return records.enumerate().filter(lambda n, _: is_mine(n, share)).map(lambda _, record: record)

        def keep(before: tf.Tensor, records: Any):
            one = tf.nest.flatten(records)[0]
            after = before + (one.nrows() if isinstance(one, tf.RaggedTensor) else tf.shape(one, tf.int64)[0])
            mine = is_mine(tf.range(before, after), share)
            return after, tf.nest.map_structure(lambda x: tf.ragged.boolean_mask(x, mine), records)

        return records.scan(np.int64(0), keep).unbatch().ragged_batch(together)

    block_length = 1 if batched else together
    return mine.interleave(of_file, cycle_length=16, block_length=block_length, num_parallel_calls=tf.data.AUTOTUNE)


def _shares(sizes: Sequence[int], shards: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [shares, 3]: which file, and from which place of `_PLACES` to which; int64 [shards + 1], each one's first."""
    ends = list(itertools.accumulate(sizes))
    bounds = [ends[-1] * shard // shards for shard in range(shards + 1)]
    of_shards: list[list[tuple[int, int, int]]] = []
    for low, high in itertools.pairwise(bounds):
        first, last = bisect.bisect_right(ends, low), bisect.bisect_left(ends, high)
        begins = [(file, ends[file] - sizes[file]) for file in range(first, last + 1) if sizes[file]]
        place = lambda byte, file, begin: min(max(byte - begin, 0), sizes[file]) * _PLACES // sizes[file]
        of_shards.append([(file, place(low, file, begin), place(high, file, begin)) for file, begin in begins])
    starts = list(itertools.accumulate(map(len, of_shards), initial=0))
    return np.reshape([share for shares in of_shards for share in shares], (-1, 3)).astype(np.int64), np.array(starts)


def compression_of(file) -> tf.Tensor:
    return tf.where(tf.strings.regex_full_match(file, r".*\.gz"), "GZIP", "")


def _lines(file) -> tf.data.Dataset:
    return tf.data.TextLineDataset(file, compression_of(file)).batch(TOGETHER)


def _full(lines: tf.data.Dataset) -> tf.data.Dataset:
    return lines.map(lambda lines: tf.boolean_mask(lines, tf.strings.length(tf.strings.strip(lines)) > 0))


def _groups_of_lines(lines: tf.data.Dataset, lines_per_document: int) -> tf.data.Dataset:
    groups = _full(lines).unbatch().batch(lines_per_document)
    return groups.map(lambda lines: tf.strings.reduce_join(lines, separator="\n")).batch(TOGETHER)


def _records(file) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(file, compression_of(file)).batch(TOGETHER)


class OpenedFile(tf.io.gfile.GFile):
    """A file of any kind of storage, as pyarrow wants it."""

    closed = False
    readable = lambda self: True

    def __init__(self, name: str):
        super().__init__(name, "rb")


def _lines_of_zst(file: str) -> Iterator[list[bytes]]:
    with OpenedFile(file) as opened:
        lines = (line.rstrip(b"\r\n") for line in io.BufferedReader(pa.CompressedInputStream(opened, "zstd")))
        while together := list(itertools.islice(lines, TOGETHER)):
            yield together


def _texts_of_parquet(file: str, text_key: str) -> Iterator[list[bytes]]:
    with OpenedFile(file) as opened:
        table = pyarrow.parquet.ParquetFile(opened)
        if text_key not in table.schema_arrow.names:
            raise UserError(
                f'{file} has no column "{text_key}"; it has {", ".join(table.schema_arrow.names)}. Name the one that holds the '
                "text with --gin.TextFiles.text_key=NAME."
            )
        for rows in table.iter_batches(TOGETHER, columns=[text_key]):
            yield [text or b"" for text in rows.column(0).cast(pa.binary()).to_pylist()]


def read_on(chunks_of: Callable[[str], Iterator[list[bytes]]]) -> Callable[[str], tf.data.Dataset]:
    """f(file) -> a dataset of `chunks_of(file)`, string [n] each, in formats that TensorFlow does not read.

    To TensorFlow a chunk is a function of the file and the chunk's number, so that the position is a number. Files stay open
    where their last chunk ended; what is asked for out of turn is read from the beginning.
    """
    opened: list[tuple[tuple[bytes, int], Iterator]] = []  # readers, and what they would give next
    behind_errors: set[tuple[bytes, int]] = set()  # TensorFlow's windows ask on and would collect errors by the thousand
    lock = threading.Lock()

    def chunk(file: bytes, number: np.int64) -> np.ndarray:
        this, after = (file, int(number)), (file, int(number) + 1)
        if this in behind_errors:
            return np.array([], object)
        with lock:
            here = next((index for index, (place, _) in enumerate(opened) if place == this), None)
            reader = opened.pop(here)[1] if here is not None else itertools.islice(chunks_of(file.decode()), this[1], None)
        try:
            found: list[bytes] = next(reader, [])
        except Exception:
            behind_errors.add(after)
            raise
        behind_errors.discard(after)
        if found:
            with lock:
                opened.append((after, reader))
                del opened[:-MOST_OPENED]
        return np.array(found, object)

    def dataset(file) -> tf.data.Dataset:
        one = lambda number: tf.ensure_shape(tf.numpy_function(chunk, [file, number], tf.string, stateful=False), [None])
        in_turn = tf.autograph.experimental.do_not_convert(lambda nothing, number: (nothing, one(number)))
        chunks = tf.data.Dataset.counter().scan(0, in_turn)  # a map might ask for several at once, each read from the beginning
        return chunks.take_while(lambda texts: tf.size(texts) > 0)

    return dataset


@tf.autograph.experimental.do_not_convert  # which would make Python that TensorFlow calls while it runs many times slower
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


def _matching(pattern: str, setting: str) -> list[str]:
    files = sorted(file for part in pattern.split(",") for file in tf.io.gfile.glob(part.strip()))
    if not files:
        raise NotHere(f'No file matches {setting} = "{pattern}". Give a pattern such as "corpus/*.txt".')
    return files


_KINDS = {
    **{f".txt{packed}": "txt" for packed in ("", ".gz")},
    **{f".{json}{packed}": "jsonl" for json in ("jsonl", "json") for packed in ("", ".gz")},
    **{".txt.zst": "txt.zst", ".jsonl.zst": "jsonl.zst", ".json.zst": "jsonl.zst", ".parquet": "parquet"},
}


def _kind(file: str) -> str:
    for end, kind in _KINDS.items():
        if file.endswith(end):
            return kind
    if ".tfrecord" in file and not file.endswith(".zst"):  # T5's are called name.tfrecord-00000-of-01024
        return "tfrecord"
    raise UserError(
        f"{file} is of no kind that can be read; give .txt, .jsonl or .json files (or .gz or .zst of these), .parquet, or "
        ".tfrecord (or .gz)."
    )
