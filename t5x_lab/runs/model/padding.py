"""Padding of lists of token ids to arrays of few different shapes."""

from collections.abc import Sequence

import numpy as np

Ids = list[int]


PADDING = -1  # padding of device arrays, since every id from 0 may be a token


def scoring_batch(
    inputs: Sequence[Ids], targets: Sequence[Ids], start: int | None, max_length: int | None = None
) -> dict[str, np.ndarray]:
    """Returns model features with loss on the targets.

    Args:
      inputs: inputs of the encoder, or if `start` is None, the decoder's tokens before the targets.
      targets: tokens to score.
      start: start token of the decoder behind an encoder.
      max_length: maximum padded length.
    """

    def width(rows: Sequence[Ids]) -> int:
        length = bucket(max(map(len, rows)))
        return length if max_length is None else min(length, max_length)

    prefixes = inputs if start is None else [[start]] * len(targets)
    rows = [[*i, *t] for i, t in zip(prefixes, targets, strict=True)]
    decoder_inputs, decoder_targets = [row[:-1] for row in rows], [row[1:] for row in rows]
    tokens = pad(decoder_targets, width(decoder_targets))
    position = np.arange(tokens.shape[1])
    prefix, length = (np.array([len(row) for row in group])[:, None] for group in (prefixes, decoder_targets))
    batch = {
        "decoder_input_tokens": pad(decoder_inputs, tokens.shape[1]),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": ((position >= prefix - 1) & (position < length)).astype(np.int32),
    }
    if start is None:
        batch["decoder_causal_attention"] = (position < prefix).astype(np.int32)
    else:
        batch["encoder_input_tokens"] = pad(inputs, width(inputs))
    all_rows = decoder_targets if start is None else [*decoder_targets, *inputs]
    if any(0 in row for row in all_rows):  # id 0 is padding in unpacked rows
        batch |= _packed_features("decoder", decoder_targets, tokens.shape[1])
        batch |= {} if start is None else _packed_features("encoder", inputs, batch["encoder_input_tokens"].shape[1])
    return batch


def _packed_features(side: str, rows: Sequence[Ids], length: int) -> dict[str, np.ndarray]:
    """Returns segment ids and positions of rows with one segment."""
    segments = pad([[1] * len(row) for row in rows], length)
    return {f"{side}_segment_ids": segments, f"{side}_positions": np.arange(length, dtype=np.int32) * segments}


def bucket(length: int, minimum: int = 16) -> int:
    """Returns one of few lengths, at most a quarter longer than `length` (or `minimum`), so that few programs are compiled."""
    return max(round_up(length, max(minimum, 1 << max((length - 1).bit_length() - 3, 0))), minimum)


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def pad(rows: Sequence[Sequence[int]], length: int, padding: int = 0) -> np.ndarray:
    """Returns int32 [len(rows), length], padded on the right."""
    out = np.full((len(rows), length), padding, np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


def pad_rows(x: np.ndarray, rows: int, padding: int = 0) -> np.ndarray:
    """Appends rows of padding to `x`."""
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=padding)
