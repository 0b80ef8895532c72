"""Files of texts and records on any storage: names by pattern, sizes, and reading.

TensorFlow reads disks and Google's gs://. It knows neither s3:// nor other servers with Google's protocol, which are read
through fsspec. Of files that only TensorFlow parses, such as TFRecords, it reads copies on this disk.
"""

import collections
import copy
import functools
import io
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import seqio
import tensorflow as tf
from etils import epath
from tensorflow_datasets.core import file_adapters

from t5x_lab.config.object_storage import is_object_storage, open_file_system, open_object, retry
from t5x_lab.config.temporary import copy_file, make_temporary_folder

MAX_COPIES = 256  # the oldest is removed; TensorFlow reads on in one that it has opened


def is_known_to_tensorflow(path: str) -> bool:
    """Returns whether TensorFlow reads a path itself."""
    is_of_google = path.startswith("gs://") and "STORAGE_EMULATOR_HOST" not in os.environ
    return is_of_google or not is_object_storage(path)


def list_matches(pattern: str) -> list[str]:
    """Returns the files and folders that a pattern matches, sorted.

    Raises:
      UserError: if packages for the storage are not installed.
    """
    if is_known_to_tensorflow(pattern):
        return sorted(tf.io.gfile.glob(pattern))
    system, path = open_file_system(pattern)
    try:
        return sorted(system.unstrip_protocol(name) for name in retry(lambda: system.glob(path), pattern))
    except FileNotFoundError:  # no such bucket
        return []


def is_folder(path: str) -> bool:
    if is_known_to_tensorflow(path):
        return tf.io.gfile.isdir(path)
    system, name = open_file_system(path)
    return retry(lambda: system.isdir(name), path)


def file_size(path: str) -> int | None:
    """Returns the bytes of a file, None if the name is not that of a file. Storage errors are raised."""
    if is_known_to_tensorflow(path):
        try:
            return tf.io.gfile.stat(path).length
        except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
            return None
    system, name = open_file_system(path)
    try:
        return retry(lambda: system.size(name), path)
    except FileNotFoundError:
        return None


def open_stored(path: str) -> io.BufferedIOBase | tf.io.gfile.GFile:
    """Opens a file for reading bytes, with the methods that pyarrow needs."""
    if is_known_to_tensorflow(path):
        return _FileOfTensorFlow(path)
    return open_object(path)


class _FileOfTensorFlow(tf.io.gfile.GFile):
    closed = False
    readable = lambda self: True

    def __init__(self, path: str):
        super().__init__(path, "rb")


def read_copies(read: Callable[[Any], tf.data.Dataset], files: Sequence[str]) -> Callable[[Any], tf.data.Dataset]:
    """Returns a function that reads the same files for TensorFlow, copies of those that it does not know.

    Args:
      read: f(file name) -> dataset.
      files: names of the files that will be read. They may be patterns.
    """
    return read if all(map(is_known_to_tensorflow, files)) else functools.partial(_read_copy, read)


def _read_copy(read: Callable[[Any], tf.data.Dataset], file: Any) -> tf.data.Dataset:
    if isinstance(file, str):
        return read(copied(file))

    @tf.autograph.experimental.do_not_convert
    def copied_name(name: bytes) -> bytes:
        return copied(name.decode()).encode()

    return read(tf.ensure_shape(tf.numpy_function(copied_name, [file], tf.string, stateful=False), []))


def copied(path: str) -> str:
    """Returns the name of a file that TensorFlow reads: itself, or its copy on this disk."""
    if is_known_to_tensorflow(path):
        return path
    with _lock:
        if path in _copies:
            _copies.move_to_end(path)
            return _copies[path]
    name = str(_folder() / uuid.uuid4().hex)
    retry(lambda: copy_file(epath.Path(path), epath.Path(name)), path)
    with _lock:
        _copies[path] = name
        removed = [_copies.popitem(last=False)[1] for _ in range(len(_copies) - MAX_COPIES)]
    for old in removed:
        os.remove(old)
    return name


_copies: collections.OrderedDict[str, str] = collections.OrderedDict()  # copies by path, the last used at the end
_lock = threading.Lock()
_folder = functools.cache(make_temporary_folder)


def read_source_copies(task: seqio.Task) -> seqio.Task:
    """Returns a task whose files TensorFlow can read: itself, or a copy that reads copies of files on other storages.

    Sources that read files in their own way are left as they are.
    """
    source = task.source
    if isinstance(source, seqio.TfdsDataSource):
        read_tfds_copies(str(source.tfds_dataset.data_dir or ""))
    if not isinstance(source, seqio.FileDataSource):
        return task
    by_split = {split: [*map(str, tf.nest.flatten(pattern))] for split, pattern in source._split_to_filepattern.items()}
    names = [name for patterns in by_split.values() for name in patterns]
    if getattr(source, "reads_any_storage", False) or all(map(is_known_to_tensorflow, names)):
        return task
    new_source, new_task = copy.copy(source), copy.copy(task)
    matches = functools.cache(lambda split: [file for pattern in by_split[split] for file in list_matches(pattern)])
    new_source._reader, new_source.list_shards = read_copies(source._reader, names), matches
    new_task._source = new_source
    return new_task


def read_tfds_copies(data_dir: str) -> None:
    """Lets TensorFlow Datasets read copies of records if its folder is on a storage that TensorFlow does not know."""
    if not is_known_to_tensorflow(data_dir):
        file_adapters.ADAPTER_FOR_FORMAT[file_adapters.FileFormat.TFRECORD] = _CopiedRecords


class _CopiedRecords(file_adapters.TfRecordFileAdapter):
    @classmethod
    def make_tf_data(cls, filename: Any, buffer_size: int | None = None) -> tf.data.Dataset:
        return _read_copy(functools.partial(super().make_tf_data, buffer_size=buffer_size), filename)
