"""Lists of token ids into padded arrays, of few different shapes."""

from collections.abc import Sequence

import numpy as np

Ids = list[int]


PADDING = -1  # of ids on their way to a device: every id from 0 on may be a token


def scoring_batch(
    inputs: Sequence[Ids], targets: Sequence[Ids], start: int | None, max_length: int | None = None
) -> dict[str, np.ndarray]:
    """Model features that put loss on the targets alone.

    Args:
      inputs: into the encoder, where the decoder begins with `start`; or, where that is None, what the decoder reads before
        the targets.
      targets: what is scored.
      start: see above.
      max_length: rows are padded to a bucket's length, but not beyond this.
    """

    def width(rows: Sequence[Ids]) -> int:
        length = bucket(max(map(len, rows)))
        return length if max_length is None else min(length, max_length)

    prefixes = inputs if start is None else [[start]] * len(targets)
    rows = [[*i, *t] for i, t in zip(prefixes, targets, strict=True)]
    read, predicted = [row[:-1] for row in rows], [row[1:] for row in rows]
    tokens = pad(predicted, width(predicted))
    position = np.arange(tokens.shape[1])
    prefix, length = (np.array([len(row) for row in of])[:, None] for of in (prefixes, predicted))
    batch = {
        "decoder_input_tokens": pad(read, tokens.shape[1]),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": ((position >= prefix - 1) & (position < length)).astype(np.int32),
    }
    if start is None:
        batch["decoder_causal_attention"] = (position < prefix).astype(np.int32)
    else:
        batch["encoder_input_tokens"] = pad(inputs, width(inputs))
    seen = predicted if start is None else [*predicted, *inputs]
    if any(0 in row for row in seen):  # a token here, and padding where rows are not packed
        batch |= _as_packed("decoder", predicted, tokens.shape[1])
        batch |= {} if start is None else _as_packed("encoder", inputs, batch["encoder_input_tokens"].shape[1])
    return batch


def _as_packed(side: str, rows: Sequence[Ids], length: int) -> dict[str, np.ndarray]:
    """One segment a row, and padding."""
    segments = pad([[1] * len(row) for row in rows], length)
    return {f"{side}_segment_ids": segments, f"{side}_positions": np.arange(length, dtype=np.int32) * segments}


def bucket(length: int, least: int = 16) -> int:
    """A length that is one of few, at most a quarter longer than this (or `least`), so that few programs are compiled."""
    return max(round_up(length, max(least, 1 << max((length - 1).bit_length() - 3, 0))), least)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pad(rows: Sequence[Sequence[int]], length: int, padding: int = 0) -> np.ndarray:
    """Int32 [len(rows), length], padded on the right."""
    out = np.full((len(rows), length), padding, np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


def pad_rows(x: np.ndarray, rows: int, padding: int = 0) -> np.ndarray:
    """`x` with rows of padding added at its end."""
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=padding)
