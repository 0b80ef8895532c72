"""What training asks of a data source, and a source that needs no TensorFlow."""

import dataclasses
from typing import Protocol

import numpy as np
from etils import epath

HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of every batch that a process holds on its devices.

    Attributes:
      held: their indices in the batch of all processes, in order. Where `tensor` spreads a row over several processes, each
        of them holds it.
      owned: those of them that no process with a lower number holds; every row is owned by one process.
    """

    held: np.ndarray
    owned: np.ndarray

    @classmethod
    def all(cls, batch_size: int) -> "Rows":
        """The rows of a process that is alone."""
        return cls(np.arange(batch_size), np.arange(batch_size))


class Batches(Protocol):
    """An endless iterator of this process's rows of each batch, whose position can be saved and restored."""

    def __next__(self) -> HostBatch: ...

    def save(self, directory: epath.Path) -> list[epath.Path]:
        """Writes the position of this process's shards into an existing directory; returns the files."""

    def restore(self, directory: epath.Path) -> None:
        """Continues after the batch that was the last one when `save` was called."""


class SyntheticBatches:
    """Random tokens in the model's features: the same stream for the same seed, whatever the number of processes.

    Args:
      lengths: `{"targets": T}` for a decoder, and `"inputs": S` for an encoder-decoder.
      batch_size: rows of all processes together.
      vocab_size: tokens are drawn from 2 … vocab_size-1.
      seed: of the stream.
      rows: those of this process; all by default.
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
        draw = lambda length: rng.integers(2, self.vocab_size, (self.batch_size, length), np.int32)[self.rows.held]
        targets = draw(self.lengths["targets"])
        batch = {
            "decoder_target_tokens": targets,
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            "decoder_loss_weights": np.ones_like(targets),
        }
        if "inputs" in self.lengths:
            batch["encoder_input_tokens"] = draw(self.lengths["inputs"])
        return batch

    def save(self, directory: epath.Path) -> list[epath.Path]:
        if 0 not in self.rows.owned:
            return []
        (directory / "position").write_text(str(self.position))
        return [directory / "position"]

    def restore(self, directory: epath.Path) -> None:
        self.position = int((directory / "position").read_text())
