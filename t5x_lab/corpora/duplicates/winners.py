"""Choice of the page that keeps a unit: of all that have it the one whose URL has the smallest MD5, as in TFDS's `c4`."""

from collections.abc import Sequence

import numpy as np

DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])  # 16 bytes of an MD5 in their order


def digest_array(digests: bytes | bytearray) -> np.ndarray:
    """Returns MD5s, joined, as an array of `DIGEST`."""
    return np.frombuffer(digests, DIGEST)


def join_digests(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays of `DIGEST` as one. NumPy alone would change the order of their bytes."""
    return np.concatenate(parts).astype(DIGEST)


def find_losers(units: np.ndarray, urls: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows of the winners, rows of the losers): for each unit one row of the page that keeps it, and one of each
    page that loses it.

    Args:
      units: MD5s of units, `DIGEST` [N].
      urls: MD5s of the pages' URLs, `DIGEST` [N].
      pages: numbers of the pages, int [N]. The smaller of two with the same URL keeps the unit.
    """
    order = np.lexsort((pages, urls["low"], urls["high"], units["low"], units["high"]))
    units, pages = units[order], pages[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = units[1:] != units[:-1]
    winners = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    is_loser = pages != pages[winners]
    is_loser[1:] &= is_first[1:] | (pages[1:] != pages[:-1])  # once per page
    return order[is_first], order[is_loser]
