"""Lists of token ids into padded arrays, of few different shapes."""

from collections.abc import Sequence

import numpy as np

Ids = list[int]


def scoring_batch(
    inputs: Sequence[Ids], targets: Sequence[Ids], has_encoder: bool, max_length: int | None = None
) -> dict[str, np.ndarray]:
    """Model features that put loss on the targets alone: inputs into the encoder, or before them as a prefix.

    Rows are padded to a bucket's length, but not beyond `max_length`.
    """

    def width(rows: Sequence[Ids]) -> int:
        length = bucket(max(map(len, rows)))
        return length if max_length is None else min(length, max_length)

    if has_encoder:
        target_tokens = pad(targets, width(targets))
        return {
            "encoder_input_tokens": pad(inputs, width(inputs)),
            "decoder_input_tokens": np.pad(target_tokens, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": target_tokens,
        }
    rows = [[*i, *t] for i, t in zip(inputs, targets, strict=True)]
    tokens = pad(rows, width(rows))
    position = np.arange(tokens.shape[1])
    prefix = np.array([len(row) for row in inputs])[:, None]
    return {
        "decoder_input_tokens": np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": ((position >= prefix) & (tokens > 0)).astype(np.int32),
        # One more than the prefix: inputs are shifted to the right by one.
        "decoder_causal_attention": (position <= prefix).astype(np.int32),
    }


def bucket(length: int, least: int = 16) -> int:
    """A length that is one of few, at most a quarter longer than this (or `least`), so that few programs are compiled."""
    return max(round_up(length, max(least, 1 << max((length - 1).bit_length() - 3, 0))), least)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Int32 [len(rows), length], padded with 0 on the right."""
    out = np.zeros((len(rows), length), np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


def pad_rows(x: np.ndarray, rows: int) -> np.ndarray:
    """`x` with rows of zeros added at its end."""
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))


def cut_left(ids: Ids, length: int | None) -> Ids:
    """The last `length` ids, or all."""
    return ids if length is None else ids[max(len(ids) - length, 0) :]
