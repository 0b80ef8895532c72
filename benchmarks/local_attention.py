"""Time, memory and compile time of local attention by the length of the text, beside full attention.

    python benchmarks/local_attention.py [--window=512] [--rounds=3]
    TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 python benchmarks/local_attention.py --topology=v5e:2x2

Forward and backward pass of one row with four heads, causal and in both directions. CPU-seconds are medians; temporary memory
is that of the compiled program. With --topology programs are compiled for a TPU and not run. The cache is that of Gemma 3 1B's
layers after prompts of each length.
"""

import argparse
import statistics
import time

LENGTHS = (1024, 4096, 16384)
LONGEST_FULL = 4096  # of full attention, whose memory grows with the square


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--topology", help="TPU slice to compile for, such as v5e:2x2")
    args = parser.parse_args()
    print(f"{'attention':<22}{'tokens':>8}{'compile s':>12}{'CPU-s':>9}{'MiB':>9}")
    for causal in (True, False):
        for window in (args.window, None):
            for length in LENGTHS:
                if window or length <= LONGEST_FULL:
                    name = f"{'causal' if causal else 'both directions'}, {window or 'full'}"
                    seconds, cpu, mebibytes = measure(causal, window, length, args.rounds, args.topology)
                    print(f"{name:<22}{length:>8,}{seconds:>12.1f}{cpu:>9.3f}{mebibytes:>9.1f}", flush=True)
    for length in LENGTHS:
        print(f"cache of a layer after {length:,} tokens, bfloat16: local {cache_bytes(0, length):,} bytes, "
              f"global {cache_bytes(5, length):,} bytes")  # fmt: skip


def measure(causal: bool, window: int | None, length: int, rounds: int, topology: str | None) -> tuple[float, float, float]:
    """Returns seconds of compilation, CPU-seconds of a forward and backward pass (NaN for a TPU), and MiB."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from t5x_lab.ops.attention import dot_product_attention
    from t5x_lab.ops.masks import Mask, Window

    mask = Mask(causal, windows=(Window(window - 1, window - 1) if window else None,))
    attend = lambda q, k, v: jnp.sum(dot_product_attention(q, k, v, mask=mask).astype(jnp.float32) ** 2)
    function = jax.jit(jax.grad(attend, argnums=(0, 1, 2)))
    shape, dtype = (1, length, 4, 64), jnp.bfloat16 if topology else jnp.float32
    sharding = None
    if topology:
        sharding = SingleDeviceSharding(topologies.get_topology_desc(topology, platform="tpu").devices[0])
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)] * 3
    began = time.perf_counter()
    program = function.lower(*operands).compile()
    seconds = time.perf_counter() - began
    mebibytes = program.memory_analysis().temp_size_in_bytes / 2**20
    if topology:
        return seconds, float("nan"), mebibytes
    arrays = [jnp.ones(shape, dtype)] * 3
    times = []
    for _ in range(rounds + 1):
        began = time.process_time()
        jax.block_until_ready(program(*arrays))
        times.append(time.process_time() - began)
    return seconds, statistics.median(times[1:]), mebibytes


def cache_bytes(layer: int, length: int) -> int:
    """Returns the bytes of a layer's keys and values for one row, after a prompt of this length and before 64 more tokens."""
    import jax
    import jax.numpy as jnp

    from t5x_lab.models.model import Model
    from t5x_lab.runs.config.gin_config import GinConfig

    model = Model(GinConfig(["models/gemma3/1b.gin"]).model())
    prefill = lambda params, prompts: model.network(params).prefill(prompts, 64)[1]
    cache = jax.eval_shape(prefill, model.abstract_params, jax.ShapeDtypeStruct((1, length), jnp.int32)).caches[layer]
    return 2 * cache.key.size * cache.key.dtype.itemsize


if __name__ == "__main__":
    main()
