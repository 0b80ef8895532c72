"""TensorFlow datasets of files that Python reads, whose position can be saved.

The state of a tf.data iterator over a Python generator cannot be saved. Here TensorFlow has only the file and a position, and
Python keeps the open readers.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

READ_BATCH = 128  # documents that are read and parsed at a time
MAX_OPEN_FILES = 256  # the least recently used one is closed

Chunks = Iterator[tuple[list[bytes], int]]


def resumable_reader(read_chunks: Callable[[str, int], Chunks]) -> Callable[[Any], tf.data.Dataset]:
    """Returns f(file) -> dataset of chunks, string [n].

    Files stay open after their last chunk. A chunk out of order opens its file again.

    Args:
      read_chunks: f(file name, position) -> iterator of (raw documents, position after them) from this position on. The start
        of a file is 0. Other positions are those that it returned.
    """
    readers: list[tuple[tuple[bytes, int], Iterator]] = []  # open readers and where they continue
    after_errors: set[tuple[bytes, int]] = set()  # TensorFlow reads on after an error, and would collect thousands
    lock = threading.Lock()

    def chunk(file: bytes, position: np.int64, number: np.int64) -> tuple[np.ndarray, np.int64]:
        if (file, int(number)) in after_errors:
            return np.array([], object), position
        key = (file, int(position))
        with lock:
            index = next((i for i, (reader_key, _) in enumerate(readers) if reader_key == key), None)
            reader = readers.pop(index)[1] if index is not None else read_chunks(file.decode(), int(position))
        try:
            documents, end = next(reader, ([], int(position)))
        except Exception:
            after_errors.add((file, int(number) + 1))
            raise
        after_errors.discard((file, int(number) + 1))
        if documents:
            with lock:
                readers.append(((file, end), reader))
                del readers[:-MAX_OPEN_FILES]
        return np.array(documents, object), np.int64(end)

    def dataset(file: Any) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def step(position: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            texts, end = tf.numpy_function(chunk, [file, position, number], (tf.string, tf.int64), stateful=False)
            return tf.ensure_shape(end, []), tf.ensure_shape(texts, [None])

        chunks = tf.data.Dataset.counter().scan(np.int64(0), step)  # a map might read several at once, each from the start
        return chunks.take_while(lambda texts: tf.size(texts) > 0)

    return dataset


def numbered_chunks(read: Callable[[str], Iterator[Any]]) -> Callable[[str, int], Chunks]:
    """Returns `read_chunks` of a reader that can only start at the start of a file. Its positions are numbers of chunks.

    Args:
      read: f(file name) -> iterator of raw documents.
    """

    def read_chunks(file: str, position: int) -> Chunks:
        documents = read(file)
        chunks = iter(lambda: list(itertools.islice(documents, READ_BATCH)), [])
        return ((chunk, number + 1) for number, chunk in enumerate(chunks) if number >= position)

    return read_chunks


def chunks_of(documents: Iterator[tuple[bytes, int]]) -> Chunks:
    """Yields chunks of (document, position after it)."""
    while batch := list(itertools.islice(documents, READ_BATCH)):
        yield [document for document, _ in batch], batch[-1][1]
