"""Fingerprints of a run's text files. A run is not resumed on files that changed, since its position would be wrong."""

import concurrent.futures
import functools
import zlib
from collections.abc import Mapping

import seqio
import tensorflow as tf

from t5x_lab.data.cache.reading import split_source
from t5x_lab.data.sources.storage import file_size, open_stored
from t5x_lab.data.tasks.mixture import ResolvedMixture

END_BYTES = 4_096  # bytes that are hashed at either end of a file
MAX_HASHED_FILES = 64  # of more files, only sizes are compared

Files = dict[str, list[int]]


def file_fingerprints(mixture: ResolvedMixture) -> dict[str, Files]:
    """Returns by task and file its size in bytes and, for few files, the CRC-32 of its two ends.

    Only sources of files are listed. Modification times are left out, since copies have others.
    """
    files_by_task = {c.task.name: _list_files(c.task.source, mixture.split) for c in mixture.train_components}
    all_files = sorted({name for files in files_by_task.values() for name in files})
    fingerprint = functools.partial(_fingerprint, hash_ends=len(all_files) <= MAX_HASHED_FILES)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = dict(zip(all_files, pool.map(fingerprint, all_files), strict=True))
    return {
        task: {name: results[name] for name in files} for task, files in files_by_task.items() if files and results[files[0]]
    }


def find_change(saved: Mapping[str, Files], current: Mapping[str, Files]) -> str | None:
    """Returns the first difference as the end of a sentence, None if there is none."""
    for task in sorted(saved.keys() & current.keys()):
        old, new = saved[task], current[task]
        for name in sorted({*old, *new}):
            if name not in old:
                return f'in task "{task}", {name} is new'
            if name not in new:
                return f'in task "{task}", {name} is missing'
            if old[name][0] != new[name][0]:
                return f'in task "{task}", {name} had {old[name][0]:,} bytes and has {new[name][0]:,}'
            if len(old[name]) == len(new[name]) and old[name] != new[name]:
                return f'in task "{task}", {name} has the same size and another content'
    return None


def _list_files(source: seqio.DataSource, split: str) -> list[str]:
    source = split_source(source, split)
    return [str(name) for name in source.list_shards(split)] if isinstance(source, seqio.FileDataSource) else []


def _fingerprint(name: str, hash_ends: bool) -> list[int]:
    try:
        size = file_size(name)
        return [] if size is None else [size, *([_hash_ends(name, size)] if hash_ends else [])]
    except tf.errors.OpError:  # the name is not that of a file
        return []


def _hash_ends(name: str, size: int) -> int:
    with open_stored(name) as file:
        first = file.read(END_BYTES)
        file.seek(max(size - END_BYTES, 0))
        return zlib.crc32(first + file.read(END_BYTES))
