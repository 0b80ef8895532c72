"""Choice of the page that keeps a unit: of all that have it the one whose URL has the smallest MD5, as in TFDS's `c4`."""

import numpy as np


def find_losers(units: np.ndarray, urls: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows of the winners, rows of the losers): for each unit one row of the page that keeps it, and one of each
    page that loses it.

    Args:
      units: MD5s of units, `digests.DIGEST` [N].
      urls: MD5s of the pages' URLs, `digests.DIGEST` [N].
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


def split_rows(rows: np.ndarray, buckets: np.ndarray, num_buckets: int) -> list[np.ndarray]:
    """Returns the rows of each bucket, in their order.

    Args:
      rows: int [N].
      buckets: bucket of each row, int [N].
      num_buckets: number of buckets.
    """
    order = np.argsort(buckets, kind="stable")
    return np.split(rows[order], np.searchsorted(buckets[order], np.arange(1, num_buckets)))
