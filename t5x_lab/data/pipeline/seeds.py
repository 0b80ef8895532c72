"""Seeds of the input pipeline, derived from (run, task, shard)."""

import zlib

import numpy as np
import tensorflow as tf


def derive_seed(*parts: int | str | tf.Tensor) -> int:
    """Returns a seed of 31 bits derived from numbers and names.

    A shard number that is a tensor is ignored, since the graph of all shards has the shard's seed.
    """
    numbers = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts if not tf.is_tensor(part)]
    return int(np.random.default_rng(numbers).integers(2**31))
