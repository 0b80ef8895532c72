"""Protocol of batch iterators, and synthetic batches without TensorFlow."""

import dataclasses
from typing import Protocol

import numpy as np
from etils import epath

HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of the global batch on the devices of a process.

    Attributes:
      held: indices of the rows in order. If the mesh axis `tensor` spans processes, each of them holds the row.
      owned: held rows that no process with a lower index holds. Every row is owned by one process.
    """

    held: np.ndarray
    owned: np.ndarray

    @classmethod
    def all(cls, batch_size: int) -> "Rows":
        """Returns the rows of a single process."""
        return cls(np.arange(batch_size), np.arange(batch_size))


class Batches(Protocol):
    """Endless iterator of this process's rows of each batch, with a position that can be saved and restored."""

    def __next__(self) -> HostBatch: ...

    def save(self, directory: epath.Path) -> list[epath.Path]:
        """Writes the position of this process's shards to an existing directory on a disk. Returns the files."""

    def needs(self, name: str) -> bool:
        """Returns whether `restore` reads a file that `save` of this or another process wrote."""

    def restore(self, directory: epath.Path, checkpoint: epath.Path) -> None:
        """Continues after the last batch before `save`.

        Args:
          directory: directory with the files that are needed.
          checkpoint: the checkpoint they belong to, for messages.
        """


class SyntheticBatches:
    """Random tokens as model features, independent of the number of processes.

    Args:
      lengths: `{"targets": T}`, for an encoder-decoder also `"inputs": S`.
      batch_size: rows of the global batch.
      vocab_size: tokens are sampled from 2 to vocab_size - 1.
      seed: seed of the random numbers.
      rows: rows of this process. Default: all.
    """

    def __init__(self, lengths: dict[str, int], batch_size: int, vocab_size: int, seed: int = 0, rows: Rows | None = None):
        self.lengths, self.batch_size, self.vocab_size, self.seed = dict(lengths), batch_size, vocab_size, seed
        self.rows = rows or Rows.all(batch_size)
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self) -> HostBatch:
        rng = np.random.default_rng([self.seed, self.position])
        self.position += 1
        sample = lambda length: rng.integers(2, self.vocab_size, (self.batch_size, length), np.int32)[self.rows.held]
        targets = sample(self.lengths["targets"])
        batch = {
            "decoder_target_tokens": targets,
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            "decoder_loss_weights": np.ones_like(targets),
        }
        if "inputs" in self.lengths:
            batch["encoder_input_tokens"] = sample(self.lengths["inputs"])
        return batch

    def save(self, directory: epath.Path) -> list[epath.Path]:
        if 0 not in self.rows.owned:
            return []
        (directory / "position").write_text(str(self.position))
        return [directory / "position"]

    def needs(self, name: str) -> bool:
        return name == "position"

    def restore(self, directory: epath.Path, checkpoint: epath.Path) -> None:
        self.position = int((directory / "position").read_text())
