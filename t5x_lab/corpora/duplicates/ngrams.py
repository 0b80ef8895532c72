"""Hashes of the n-grams of words in a text. Case and punctuation do not count."""

import functools
import hashlib
import re

import numpy as np

_WORD = re.compile(r"\w+")


def word_hashes(text: str) -> np.ndarray:
    """Returns a hash of each word, uint64 [N]."""
    return np.array([_word_hash(word) for word in _WORD.findall(text.lower())], np.uint64)


def ngram_hashes(tokens: np.ndarray, size: int) -> np.ndarray:
    """Returns a hash of each n-gram.

    Args:
      tokens: hashes of words, uint64 [N].
      size: number of words, n.

    Returns:
      uint64 [N − n + 1], or [0].
    """
    if len(tokens) < size:
        return np.zeros(0, np.uint64)
    combined = np.zeros(len(tokens) - size + 1, np.uint64)
    for start in range(size):
        combined = combined * np.uint64(0x9E3779B97F4A7C15) + tokens[start : start + len(combined)]
    combined ^= combined >> np.uint64(29)  # the finalizer of SplitMix64 (Steele et al., 2014)
    combined *= np.uint64(0xBF58476D1CE4E5B9)
    return combined ^ combined >> np.uint64(32)


@functools.lru_cache(1 << 18)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
