"""MinHash signatures of texts and their bands (Broder, 1997), by which nearly equal pages are found without comparing all."""

import dataclasses
import functools
import hashlib

import numpy as np

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.corpora.duplicates.ngrams import ngram_hashes, word_hashes

_BLOCK = 1 << 12  # n-grams whose hashes are computed together


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinHash:
    """Finds pages with nearly the same n-grams of words.

    Two pages whose sets of n-grams have the Jaccard similarity s share at least one band with the probability
    1 − (1 − s^rows)^bands. With the defaults, those of FineWeb (Penedo et al., 2024, section 3.4), it is 0.77 at s = 0.75 and
    0.92 at 0.8. Pages that share a band, directly or through others, are a cluster, of which the page whose URL has the
    smallest MD5 is kept.

    Attributes:
      ngram: number of words.
      bands: number of bands.
      rows: number of hashes of a band.
      seed: seed of the hash functions.
    """

    ngram: int = 5
    bands: int = 14
    rows: int = 8
    seed: int = 1

    def __post_init__(self):
        check_types(self)
        check_positive(self, "ngram", "bands", "rows")
        if self.seed < 0:
            raise UserError(f"MinHash.seed is {self.seed}. It must be at least 0.")
        if self.bands > 255:
            raise UserError(f"MinHash.bands is {self.bands}. It must be at most 255.")

    def signature(self, text: str) -> np.ndarray | None:
        """Returns the smallest value of each hash function over a text's n-grams, uint32 [bands × rows]; None without words."""
        tokens = word_hashes(text)
        if not len(tokens):
            return None
        hashes = np.unique(ngram_hashes(tokens, min(self.ngram, len(tokens))) >> np.uint64(32))
        factors, addends = _hash_functions(self.bands * self.rows, self.seed)
        smallest = np.full(self.bands * self.rows, np.iinfo(np.uint64).max, np.uint64)
        for start in range(0, len(hashes), _BLOCK):
            np.minimum(smallest, (hashes[start : start + _BLOCK, None] * factors + addends).min(axis=0), out=smallest)
        return (smallest >> np.uint64(32)).astype(np.uint32)

    def band_hashes(self, text: str) -> list[bytes]:
        """Returns a digest of 16 bytes of each band; [] for a text without words."""
        signature = self.signature(text)
        if signature is None:
            return []
        parts = signature.reshape(self.bands, self.rows)
        return [hashlib.md5(bytes([number]) + part.tobytes()).digest() for number, part in enumerate(parts)]


@functools.cache
def _hash_functions(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (factors, addends) of hash functions, the upper half of factor × x + addend modulo 2^64, of 32-bit numbers x.

    These are strongly universal (Dietzfelbinger, 1996).
    """
    generator, limit = np.random.Generator(np.random.PCG64(seed)), np.iinfo(np.uint64).max
    factors, addends = (generator.integers(0, limit, number, np.uint64, endpoint=True) for _ in range(2))
    return factors, addends
