"""Attention with T5's bias compiled for TPUs without a TPU: fused kernels beside blocks, by the length of the text.

    pip install libtpu && python benchmarks/fused_attention.py [--topologies v4:2x2x1 v5e:2x2 v5p:2x2x1 v6e:2x2]

Forward and backward pass of the self-attention of T5 base's encoder (12 heads of size 64, bfloat16, packed rows), 16,384 tokens
or one row. Temporary memory and size of the compiled program. Traffic is what the program moves to and from the chip's memory:
the compiler's count, which has the operands of kernels once, and the tiles that kernels read again.
"""

import argparse
import contextlib
import os
import time

LENGTHS = (512, 4096, 16384, 65536)
LONGEST_IN_BLOCKS = 4096  # whose program grows with the number of blocks
TOKENS, HEADS, HEAD_DIM = 16384, 12, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="*", default=["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    args = parser.parse_args()
    for name, value in (("JAX_PLATFORMS", "cpu"), ("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    print(f"{'chip':<10}{'attention':<10}{'length':>8}{'compile s':>11}{'MiB':>9}{'program MiB':>13}{'traffic GiB':>13}")
    for topology in args.topologies:
        for is_fused in (True, False):
            for length in args.lengths:
                if is_fused or length <= LONGEST_IN_BLOCKS:
                    seconds, memory, program, traffic = measure(topology, length, is_fused)
                    name = "fused" if is_fused else "blocks"
                    print(f"{topology.split(':')[0]:<10}{name:<10}{length:>8,}{seconds:>11.1f}{memory:>9.0f}{program:>13.2f}"
                          f"{traffic:>13.2f}", flush=True)  # fmt: skip


def measure(topology: str, length: int, is_fused: bool) -> tuple[float, float, float, float]:
    """Returns seconds of compilation, MiB of temporary memory and of the program, and GiB of traffic."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from t5x_lab.ops.attention import dot_product_attention
    from t5x_lab.ops.biases import DiagonalBias
    from t5x_lab.ops.masks import Mask
    from t5x_lab.ops.platform import Target, tracing_for

    rows = max(1, TOKENS // length)
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def attend(query, key, value, bias, segments, weights):
        mask = Mask(False, segments, segments)
        attended = dot_product_attention(query, key, value, mask=mask, bias=DiagonalBias(bias, length))
        return jnp.sum(attended.astype(jnp.float32) * weights)

    operand = array(jnp.bfloat16, rows, length, HEADS, HEAD_DIM)
    inputs = [operand] * 3 + [array(jnp.float32, HEADS, 2 * length - 1), array(jnp.int32, rows, length), operand]
    began = time.perf_counter()
    with tracing_for(Target("tpu", device.device_kind)) if is_fused else contextlib.nullcontext():
        compiled = jax.jit(jax.grad(attend, argnums=(0, 1, 2, 3))).lower(*inputs).compile()
    seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
    traffic = compiled.cost_analysis()["bytes accessed"] + (read_again(length, rows) if is_fused else 0)
    mebibytes = [size / 2**20 for size in (memory.temp_size_in_bytes, memory.generated_code_size_in_bytes)]
    return seconds, mebibytes[0], mebibytes[1], traffic / 2**30


def read_again(length: int, rows: int) -> int:
    """Returns the bytes of tiles that the three kernels read after the first time."""
    from t5x_lab.ops.kernels.tpu import SIZES

    tiles = -(-length // SIZES[0])
    tile = min(length, SIZES[0]) * HEAD_DIM * 2
    return 3 * 2 * rows * HEADS * tiles * (tiles - 1) * tile  # keys and values in two of them, queries and gradients in one


if __name__ == "__main__":
    main()
