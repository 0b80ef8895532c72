"""What the files of a run's text are like, so that a run is not continued on another text than its position is of."""

import concurrent.futures
import functools
import zlib
from collections.abc import Mapping

import seqio
import tensorflow as tf

from t5x_lab.data.caches import opened
from t5x_lab.data.mixture import WeightedTasks

END = 4_096  # bytes at either end of a file that are looked at
LOOKED_INTO = 64  # files; of more the sizes alone are compared

Files = dict[str, list[int]]


def files_of(tasks: WeightedTasks) -> dict[str, Files]:
    """By task and file: its size in bytes, and the CRC-32 of its two ends where there are few. Of sources of files alone.

    Times are left out: a copy of a text has others.
    """
    names = {part.task.name: _list(part.task.source, tasks.split) for part in tasks.trained}
    every = sorted({name for files in names.values() for name in files})
    look = functools.partial(_look, into=len(every) <= LOOKED_INTO)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = dict(zip(every, pool.map(look, every), strict=True))
    return {task: {name: found[name] for name in files} for task, files in names.items() if files and found[files[0]]}


def changes(before: Mapping[str, Files], now: Mapping[str, Files]) -> str | None:
    """The first difference, as the end of a sentence; None where there is none."""
    for task in sorted(before.keys() & now.keys()):
        old, new = before[task], now[task]
        for name in sorted({*old, *new}):
            if name not in old:
                return f'of the task "{task}": {name} is new'
            if name not in new:
                return f'of the task "{task}": {name} is not there any more'
            if old[name][0] != new[name][0]:
                return f'of the task "{task}": {name} had {old[name][0]:,} bytes and has {new[name][0]:,}'
            if len(old[name]) == len(new[name]) and old[name] != new[name]:
                return f'of the task "{task}": {name} has the size that it had, and another text'
    return None


def _list(source: seqio.DataSource, split: str) -> list[str]:
    source = opened(source, split)
    return [str(name) for name in source.list_shards(split)] if isinstance(source, seqio.FileDataSource) else []


def _look(name: str, into: bool) -> list[int]:
    try:
        size = tf.io.gfile.stat(name).length
        return [size, *([_ends(name, size)] if into else [])]
    except tf.errors.OpError:  # the name is not a file's
        return []


def _ends(name: str, size: int) -> int:
    with tf.io.gfile.GFile(name, "rb") as file:
        first = file.read(END)
        file.seek(max(size - END, 0))
        return zlib.crc32(first + file.read(END))
