"""Training batches: logical shards of a SeqIO task or mixture, with a position that checkpoints save."""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from etils import epath

from t5x_lab.checkpoints.layout import initial_checkpoint_flags, read_info
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.checks import check_vocabulary
from t5x_lab.data.pipeline.closing import close_at_exit
from t5x_lab.data.pipeline.failures import report_failing_record
from t5x_lab.data.pipeline.file_changes import file_fingerprints, find_change
from t5x_lab.data.pipeline.rates import example_rates
from t5x_lab.data.pipeline.reading import are_separate, task_shard
from t5x_lab.data.pipeline.rows import build_shards
from t5x_lab.data.tasks.mixture import ResolvedMixture, resolve_mixture
from t5x_lab.training.batches import HostBatch, Rows


def resolve_tasks(config: DataConfig, architecture: str, vocab_size: int) -> ResolvedMixture:
    """Returns the run's tasks, checked against the model before any text is read.

    Raises:
      UserError: for an unknown name, lengths or an architecture that do not fit, or a vocabulary larger than the model's.
    """
    mixture = resolve_mixture(config, architecture)
    check_vocabulary(mixture, config, vocab_size)
    return mixture


FINGERPRINTS_FILE = "files.json"  # fingerprints of the text files, beside the positions
BLOCK_FILE = "block.json"  # rows of a shard that are read at a time
_REST_SUFFIX = ".npz"


class SeqioBatches:
    """Endless training batches of this process's rows. See `t5x_lab.training.batches.Batches`.

    Rows of a batch are grouped by shard, in the order of the shards. A process reads the shards that its rows come from, and
    saves the positions of those whose first row it owns. Shards of many tasks are read and saved together, see
    `t5x_lab.data.pipeline.graph`. A process that gets other shards after a restart reads all that were saved together, and
    drops the others.

    A shard's rows are read in blocks of a size that is fixed for a run, so that batches of any size have the same rows in the
    same order. Rows of a block that are not used yet are saved with the position.

    Args:
      mixture: tasks to read.
      config: batch sizes, shards, packing.
      seed: seed of shuffling and of all random choices. Each shard derives its own.
      rows: function that returns the rows of this process for a batch size. Default: all.

    Attributes:
      step: number of the last training step that had a batch, which batch sizes depend on.
    """

    def __init__(self, mixture: ResolvedMixture, config: DataConfig, seed: int, rows: Callable[[int], Rows] = Rows.all):
        self.step = 0
        self._mixture, self._config, self._seed, self._rows_of = mixture, config, seed, rows
        first_size = config.batch_size_at(1)
        self._block = first_size // config.shards  # rows of a shard that are read at a time
        held = rows(first_size)
        self._shards = np.unique(held.held // self._block).tolist()
        num_read = len(self._shards) * self._block
        if num_read > len(held.held):
            print(
                f"This process reads {num_read} rows of each batch and uses {len(held.held)} of them, because its rows are "
                f"parts of shards. Set DATA_SHARDS ({config.shards}) to a multiple of the number of processes in a new run.",
                file=sys.stderr,
            )
        self._owned = {shard for shard in self._shards if shard * self._block in held.owned}
        self._indices: dict[int, np.ndarray] = {}
        self._rest: dict[int, HostBatch] = {}  # rows by shard that were read and are not used yet
        owned = tuple(sorted(self._owned))
        is_joint = owned and not are_separate(len(mixture.train_components))
        groups = [owned] if is_joint else [(shard,) for shard in owned]
        groups += [(shard,) for shard in self._shards if shard not in self._owned]
        with self._report_failing_record():
            self._rates = example_rates(mixture, config)
            self._datasets = {group: self._build(group) for group in groups}
        self._fingerprints = file_fingerprints(mixture)
        close_at_exit(self)

    def _build(self, shards: tuple[int, ...]) -> tf.data.Dataset:
        return build_shards(self._mixture, self._config, self._seed, self._rates, self._block, shards)

    def close(self) -> None:
        """Ends the iterators. Later batches begin where the data begin."""
        self.__dict__.pop("_iterators", None)
        self._rest = {}

    def __iter__(self):
        return self

    def _report_failing_record(self):
        return report_failing_record(self._mixture.train_components, self._config.split)

    @functools.cached_property
    def _iterators(self) -> dict[tuple[int, ...], Iterator]:
        return {group: iter(dataset.prefetch(2 * len(group))) for group, dataset in self._datasets.items()}

    def __next__(self) -> HostBatch:
        size = self._config.batch_size_at(self.step + 1)
        parts = self._take(size // self._config.shards)
        self.step += 1
        return {name: np.concatenate([part[name] for part in parts])[self._row_indices(size)] for name in parts[0]}

    def _take(self, num_rows: int) -> list[HostBatch]:
        """Returns the next rows of each shard."""
        rows = self._rest or self._read_block()
        while _count_rows(rows) < num_rows:
            block = self._read_block()
            rows = {shard: _concatenate(rows[shard], block[shard]) for shard in self._shards}
        part = lambda where: {shard: {name: x[where] for name, x in rows[shard].items()} for shard in self._shards}
        self._rest = part(slice(num_rows, None)) if _count_rows(rows) > num_rows else {}
        return list(part(slice(num_rows)).values())

    def _read_block(self) -> dict[int, HostBatch]:
        """Returns the next block of rows of each shard."""
        try:
            with self._report_failing_record():
                blocks = {shard: next(iterator) for group, iterator in self._iterators.items() for shard in group}
        except StopIteration:
            raise UserError(
                f"The data have no complete batch: {self._find_empty_shard()} is empty after preprocessing. Lower DATA_SHARDS "
                "or BATCH_SIZE, shorten TASK_FEATURE_LENGTHS, or add text."
            ) from None
        return {shard: {name: x.numpy() for name, x in block.items()} for shard, block in blocks.items()}

    def _row_indices(self, size: int) -> np.ndarray:
        """Returns the rows of this process among the rows of all its shards, for a batch size."""
        if size not in self._indices:
            held, per_shard = self._rows_of(size).held, size // self._config.shards
            self._indices[size] = np.searchsorted(self._shards, held // per_shard) * per_shard + held % per_shard
        return self._indices[size]

    def _find_empty_shard(self) -> str:
        """Returns a task and a shard without examples, if one is found within a minute."""
        start = time.monotonic()
        components = self._mixture.train_components
        for component in components:
            for shard in self._shards if time.monotonic() - start < 60 else ():
                dataset = task_shard(component, self._config, 0, shard, len(components))
                if next(iter(dataset), None) is None:
                    return f'shard {shard} of the task "{component.task.name}"'
        return "a shard of the training split"

    def save(self, directory: epath.Path) -> list[epath.Path]:
        """Saves the positions of the owned shards. Returns the files."""
        files = []
        if 0 in self._owned:
            for name, value in ((FINGERPRINTS_FILE, self._fingerprints), (BLOCK_FILE, self._block)):
                (directory / name).write_text(json.dumps(value))
                files.append(directory / name)
        for shard in self._owned & self._rest.keys():
            files.append(directory / _rest_file_name(shard))
            rows: Any = self._rest[shard]
            np.savez(files[-1], **rows)
        for group, iterator in self._iterators.items():
            if group[0] in self._owned:
                name = _position_file_name(group)
                tf.train.Checkpoint(iterator=iterator).write(str(directory / name))
                files += list(directory.glob(f"{name}.*"))
        return files

    def needs(self, name: str) -> bool:
        """Returns whether this process reads a saved file: all small ones, and the positions of its own shards."""
        is_position = name.startswith(_position_file_name(())) and not name.endswith(".index")
        if is_position:
            return not {*_parse_position_file_name(name)}.isdisjoint(self._shards)
        return not name.endswith(_REST_SUFFIX) or name in map(_rest_file_name, self._shards)

    def restore(self, directory: epath.Path, checkpoint: epath.Path) -> None:
        """Moves the iterators to saved positions.

        Args:
          directory: directory with the files that are needed.
          checkpoint: the checkpoint they belong to, for messages.

        Raises:
          UserError: if the number of shards or the text files changed.
        """
        saved = [_parse_position_file_name(file.name) for file in directory.iterdir() if file.name.endswith(".index")]
        groups = {shard: group for group in saved for shard in group}
        if set(groups) != set(range(self._config.shards)):
            raise UserError(
                f"The checkpoint holds the positions of {len(groups)} data shards, not of {self._config.shards}. DATA_SHARDS "
                f"cannot change during a run. Set --gin.DATA_SHARDS={len(groups)}."
            )
        self._check_files(directory, checkpoint)
        block = self._read_block_size(directory, checkpoint)
        reusable = self._datasets if block == self._block else {}
        self._block = block
        needed = sorted({groups[shard] for shard in self._shards})
        self._datasets = {group: reusable.get(group) or self._build(group) for group in needed}
        self.close()
        files = {shard: directory / _rest_file_name(shard) for shard in self._shards}
        self._rest = {shard: dict(np.load(file)) for shard, file in files.items() if file.exists()}
        for group, iterator in self._iterators.items():
            path = str(directory / _position_file_name(group))
            tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()

    def _read_block_size(self, directory: epath.Path, checkpoint: epath.Path) -> int:
        """Returns the rows of a shard that the run reads at a time."""
        if (directory / BLOCK_FILE).exists():
            return parse_json((directory / BLOCK_FILE).read_text())
        size = read_info(checkpoint).get("settings", {}).get("BATCH_SIZE")  # of an earlier version, whose size never changes
        return int(size) // self._config.shards if size else self._block

    def _check_files(self, directory: epath.Path, checkpoint: epath.Path) -> None:
        """Raises a `UserError` if the text files changed since the checkpoint."""
        if not (directory / FINGERPRINTS_FILE).exists():
            return  # a checkpoint of an earlier version
        change = find_change(parse_json((directory / FINGERPRINTS_FILE).read_text()), self._fingerprints)
        if change:
            raise UserError(
                f"The text files changed since the checkpoint: {change}. The saved position is invalid for them. Restore the "
                f"files, or train on the new text in a new MODEL_DIR, with {initial_checkpoint_flags(checkpoint)}"
            )


def _position_file_name(shards: tuple[int, ...]) -> str:
    """Returns the checkpoint file name for a group of data shards."""
    return "shard_" + "_".join(map(str, shards))


def _parse_position_file_name(file: str) -> tuple[int, ...]:
    """Returns the group of data shards of a checkpoint file name."""
    return tuple(map(int, file.partition(".")[0].removeprefix("shard_").split("_")))


def _rest_file_name(shard: int) -> str:
    """Returns the checkpoint file name for rows of a data shard that were read and not used yet."""
    return f"rows_{shard}{_REST_SUFFIX}"


def _count_rows(blocks: dict[int, HostBatch]) -> int:
    """Returns the number of rows that each shard has."""
    return len(next(iter(next(iter(blocks.values())).values())))


def _concatenate(first: HostBatch, second: HostBatch) -> HostBatch:
    return {name: np.concatenate([x, second[name]]) for name, x in first.items()}
