"""Attention and training steps on an NVIDIA GPU: fused kernels beside blocks, JAX's attention and PyTorch's transformers.

    pip install -e '.[gpu,compare]' && python benchmarks/gpu.py [--parts check attention steps curves]
        [--lengths 512 2048 8192] [--cases=24] [--text=TEXT_FILE]

check: results and gradients of the kernels, compiled, against a softmax in float32, the bias's gradient included, on random
lengths, heads, segments, prefixes, windows and caps.
attention: forward, and forward with backward pass, of 16,384 tokens in bfloat16, with T5 base's heads (12 of size 64, packed
rows, T5's bias) and a decoder's (16 of size 128, causal). JAX's functions get the bias and the mask as an array.
steps: training steps of T5 1.1 large (512 + 114 tokens) and of a decoder with 1.5 billion parameters (1,024 tokens), Adafactor,
bfloat16 activations, and the share of the card's peak rate. PyTorch trains T5 1.1 large in bfloat16 with AdamW.
curves: losses of 500 steps of a small T5 that reads 256 bytes of a text file and writes the next 128, with kernels and blocks.

Each part, and each model, is in a process of its own. Medians over calls that end with the device idle.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

TOKENS = 16384
SHAPES = {"T5 base": dict(heads=12, head_dim=64, causal=False), "decoder": dict(heads=16, head_dim=128, causal=True)}


def seconds_of(function, *args, calls: int = 10) -> float:
    """Returns the median time of calls of a function of JAX's, after two to warm up."""
    import jax

    seconds = []
    for _ in range(calls + 2):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


# ---- check


def check(args) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from t5x_lab.ops.attention import dot_product_attention
    from t5x_lab.ops.biases import DiagonalBias
    from t5x_lab.ops.blocked_attention import Weighting, blocked_attention
    from t5x_lab.ops.blocks import Operands
    from t5x_lab.ops.masks import Mask, Window

    worst: dict[str, float] = {}
    for seed in range(args.cases):
        rng = np.random.default_rng(seed)
        T, H, group = int(rng.integers(1, 700)), int(rng.choice([16, 32, 64, 128])), int(rng.choice([1, 2, 4]))
        causal, window = bool(rng.integers(2)), [None, Window(*map(int, rng.integers(0, 300, 2)))][rng.integers(2)]
        cap = [None, 20.0][rng.integers(2)]
        segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, T)), axis=1) * (np.arange(T) < T - T // 8))
        prefix = jnp.asarray(rng.integers(0, 2, (2, T)).astype(bool)) if causal and rng.integers(2) else None
        mask = Mask(causal, segments, segments, prefix, prefix, windows=(window,))
        wide = [jnp.asarray(rng.normal(size=(2, T, n, H)) * H**-0.25, jnp.float32) for n in (4, 4 // group, 4 // group)]
        values = jnp.asarray(rng.normal(size=(4, 2 * T - 1)), jnp.float32)
        wanted = jnp.asarray(rng.normal(size=(2, T, 4, H)), jnp.float32) * (segments > 0)[:, :, None, None]
        for dtype in (jnp.float32, jnp.bfloat16):
            narrow = [x.astype(dtype) for x in wide]

            def kernels(q, k, v, values):
                attended = dot_product_attention(q, k, v, mask=mask, bias=DiagonalBias(values, T), logit_cap=cap)
                return jnp.sum(attended.astype(jnp.float32) * wanted)

            def reference(q, k, v, values):
                operands = Operands(*(x.astype(jnp.float32) for x in (q, k, v)), DiagonalBias(values, T))
                return jnp.sum(blocked_attention(operands, mask, None, Weighting(0.0, cap, False))[0] * wanted)

            run = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(*narrow, values)
            with jax.default_matmul_precision("highest"):
                expected = run(reference)
                got = run(kernels)
            pairs = zip(("sum", "d_query", "d_key", "d_value", "d_bias"), [expected[0], *expected[1]], [got[0], *got[1]])
            for name, a, b in pairs:
                a, b = (np.asarray(x, np.float64) for x in (a, b))
                error = float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1.0))
                name = f"{jnp.dtype(dtype).name} {name}"
                worst[name] = max(worst.get(name, 0.0), error)
        if seed % 8 == 7:
            print(f"{seed + 1} cases, at most {max(worst.values()):.1e}", flush=True)
    print(f"{args.cases} cases; largest difference relative to the largest value of an array:")
    for name, error in worst.items():
        print(f"  {name:<20}{error:.1e}", flush=True)


# ---- attention


def attention(args) -> None:
    print(f"{'shape':<9}{'length':>7} {'attention':<24}{'forward ms':>11}{'both ms':>9}{'TFLOP/s':>9}{'MiB':>7}", flush=True)
    for name, shape in SHAPES.items():
        for length in args.lengths:
            for implementation in ("kernels", "blocks", "jax.nn, XLA", "jax.nn, cuDNN"):
                if length > 2048 and implementation in ("blocks", "jax.nn, XLA"):
                    continue  # hundreds of blocks, or gigabytes of logits
                try:
                    forward, both, rate, mebibytes = measure(length, implementation, **shape)
                except Exception as error:
                    print(f"{name:<9}{length:>7,} {implementation:<24}{str(error).splitlines()[0][:90]}", flush=True)
                    continue
                print(f"{name:<9}{length:>7,} {implementation:<24}{forward * 1e3:>11.2f}{both * 1e3:>9.2f}{rate / 1e12:>9.0f}"
                      f"{mebibytes:>7.0f}", flush=True)  # fmt: skip


def measure(length: int, implementation: str, heads: int, head_dim: int, causal: bool) -> tuple[float, float, float, float]:
    """Returns seconds of the forward and of both passes, and FLOP/s (without recomputation) and MiB of temporaries of both."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from t5x_lab.ops import attention as ops
    from t5x_lab.ops.biases import DiagonalBias, expand_bias
    from t5x_lab.ops.masks import Mask, expand_mask
    from t5x_lab.ops.platform import Target, tracing_for

    rng, rows = np.random.default_rng(0), TOKENS // length
    operands = [jnp.asarray(rng.normal(size=(rows, length, heads, head_dim)), jnp.bfloat16) for _ in range(4)]
    bias = None if causal else jnp.asarray(rng.normal(size=(heads, 2 * length - 1)), jnp.float32)
    segments = None if causal else jnp.asarray(np.sort(rng.integers(1, 4, (rows, length)), axis=1))
    mask = Mask(causal, segments, segments)

    def attend(q, k, v, bias):
        diagonal = None if bias is None else DiagonalBias(bias, length)
        if implementation in ("kernels", "blocks"):
            return ops.dot_product_attention(q, k, v, mask=mask, bias=diagonal)
        array = None if diagonal is None else expand_bias(diagonal, length, length).astype(q.dtype)
        allowed = None if causal else expand_mask(mask, length, length)[:, None]
        library = implementation.split(", ")[1].lower()
        return jax.nn.dot_product_attention(q, k, v, array, allowed, scale=1.0, is_causal=causal, implementation=library)

    def loss(q, k, v, bias, wanted):
        return jnp.sum(attend(q, k, v, bias).astype(jnp.float32) * wanted)

    *inputs, wanted = operands
    kind = jax.devices()[0].device_kind
    with tracing_for(Target("gpu", kind if implementation != "blocks" else "none")):
        forward = jax.jit(attend).lower(*inputs, bias).compile()
        both = (
            jax.jit(jax.grad(loss, argnums=(0, 1, 2, *(() if bias is None else (3,))))).lower(*inputs, bias, wanted).compile()
        )
    flops = 2 * 2 * TOKENS * length * heads * head_dim * 3 / (2 if causal else 1)
    times = seconds_of(forward, *inputs, bias), seconds_of(both, *inputs, bias, wanted)
    return *times, flops / times[1], both.memory_analysis().temp_size_in_bytes / 2**20


# ---- steps

T5_LARGE = dict(
    architecture="encoder_decoder", vocab_size=32128, emb_dim=1024, num_heads=16, head_dim=64, mlp_dim=2816,
    num_encoder_layers=24, num_decoder_layers=24,
)  # fmt: skip
DECODER = dict(
    architecture="causal_decoder", vocab_size=32128, emb_dim=2048, num_heads=16, head_dim=128, mlp_dim=5632,
    num_decoder_layers=28, positions="rotary", scaling="standard",
)  # fmt: skip
MODELS = {
    "T5 1.1 large": (T5_LARGE, {"inputs": 512, "targets": 114}, 64),
    "decoder of 1.6 billion": (DECODER, {"targets": 1024}, 16),
}


def steps(args) -> None:
    for name in MODELS:
        for implementation in ("kernels", "blocks"):
            _in_process("one_step", name, implementation)
    _in_process("transformers_step")


def one_step(name: str, implementation: str) -> None:
    import jax

    from t5x_lab.models.config import ModelConfig
    from t5x_lab.networks.transformer import TransformerConfig
    from t5x_lab.observe.hardware import peak_flops
    from t5x_lab.ops.platform import Target, tracing_for
    from t5x_lab.optim.optimizers import Adafactor
    from t5x_lab.partitioning.mesh import MeshShape
    from t5x_lab.runs.model.sharded_model import ShardedModel
    from t5x_lab.runs.train.assemble import assemble
    from t5x_lab.training.batches import SyntheticBatches

    shape, lengths, rows = MODELS[name]
    kind = jax.devices()[0].device_kind
    network = TransformerConfig(**shape)
    sharded = ShardedModel(ModelConfig(network), MeshShape(1, 1, 1))
    training = assemble(sharded, Adafactor(), batch_size=rows, microbatches=1, seed=0)
    carry = [training.init_state(sharded.init_params(0))]
    batch = sharded.shard_batch(next(SyntheticBatches(lengths, rows, network.vocab_size)))
    with tracing_for(Target("gpu", kind if implementation == "kernels" else "none")):
        began = time.perf_counter()
        compiled = training.step.lower(carry[0], batch).compile()
        compilation = time.perf_counter() - began

    def step(carry):
        carry[0], metrics = compiled(carry[0], batch)
        return metrics["loss"], carry[0]

    seconds = seconds_of(step, carry)
    flops = rows * network.flops(lengths.get("inputs", 0), lengths["targets"])
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
    _print_step(f"{name}, {implementation}", rows, seconds, sum(lengths.values()), flops / seconds,
                peak_flops(kind), f"temporaries {memory:.1f} GiB, compiled in {compilation:.0f} s")  # fmt: skip


def transformers_step() -> None:
    import torch
    import transformers

    from t5x_lab.networks.transformer import TransformerConfig
    from t5x_lab.observe.hardware import peak_flops

    _, lengths, rows = MODELS["T5 1.1 large"]
    config = transformers.T5Config(
        vocab_size=32128, d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_decoder_layers=24, num_heads=16,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).to(device="cuda", dtype=torch.bfloat16)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, labels = (
        torch.randint(2, 32128, (rows, length), device="cuda") for length in (lengths["inputs"], lengths["targets"])
    )
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[2:])
    flops = rows * TransformerConfig(**T5_LARGE).flops(lengths["inputs"], lengths["targets"])
    peak = peak_flops(torch.cuda.get_device_name())
    _print_step("T5 1.1 large, transformers", rows, median, sum(lengths.values()), flops / median, peak,
                f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")  # fmt: skip


# ---- curves

SMALL = dict(
    architecture="encoder_decoder", vocab_size=384, emb_dim=512, num_heads=8, head_dim=64, mlp_dim=1024, num_encoder_layers=6,
    num_decoder_layers=6,
)  # fmt: skip


def curves(args) -> None:
    for dtype in ("bfloat16", "float32"):
        for implementation in ("kernels", "blocks"):
            _in_process("curve", args.text, dtype, implementation)


def curve(text: str, dtype: str, implementation: str, steps: int = 500, rows: int = 32, S: int = 256, T: int = 128) -> None:
    import jax
    import numpy as np

    from t5x_lab.models.config import ModelConfig
    from t5x_lab.networks.transformer import TransformerConfig
    from t5x_lab.ops.platform import Target, tracing_for
    from t5x_lab.optim.optimizers import Adafactor
    from t5x_lab.optim.schedules import LearningRate
    from t5x_lab.partitioning.mesh import MeshShape
    from t5x_lab.runs.model.sharded_model import ShardedModel
    from t5x_lab.runs.train.assemble import assemble

    ids = np.frombuffer(open(text, "rb").read(), np.uint8).astype(np.int32) + 3
    sharded = ShardedModel(ModelConfig(TransformerConfig(**SMALL, dtype=dtype)), MeshShape(1, 1, 1))
    optimizer = Adafactor(LearningRate(base_learning_rate=0.01, factors="constant"))
    training = assemble(sharded, optimizer, batch_size=rows, microbatches=1, seed=0)
    state, rng, losses = training.init_state(sharded.init_params(0)), np.random.default_rng(0), []
    with tracing_for(Target("gpu", jax.devices()[0].device_kind if implementation == "kernels" else "none")):
        for _ in range(steps):
            window = ids[rng.integers(0, len(ids) - S - T, (rows, 1)) + np.arange(S + T)]
            inputs, targets = window[:, :S], window[:, S:]
            shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
            batch = {
                "encoder_input_tokens": inputs, "decoder_input_tokens": shifted, "decoder_target_tokens": targets,
                "decoder_loss_weights": np.ones_like(targets),
            }  # fmt: skip
            state, metrics = training.step(state, sharded.shard_batch(batch))
            losses.append(metrics["loss"])
    losses = np.asarray(jax.device_get(losses))
    means = [f"{part.mean():.4f}" for part in np.split(losses, 10)]
    print(f"losses, means of {steps // 10} steps, {dtype}, {implementation}: {' '.join(means)}", flush=True)


# ----


def _print_step(name, rows, seconds, tokens, rate, peak, more) -> None:
    share = f"{rate / peak:.1%} of the peak" if peak else "peak unknown"
    print(f"{name}, batch {rows}: {seconds * 1e3:.0f} ms, {rows * tokens / seconds:,.0f} tokens/s, {rate / 1e12:.0f} TFLOP/s, "
          f"{share}; {more}", flush=True)  # fmt: skip


def _in_process(function: str, *args: str) -> None:
    """Calls a function of this file in a process of its own, with the card's memory to itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))}
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); import gpu; gpu.{function}(*{args!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    print(result.stdout, end="")
    if result.returncode:
        print(f"{function}{args} failed: {result.stderr.strip().splitlines()[-1][:200]}", flush=True)


PARTS = {"check": check, "attention": attention, "steps": steps, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=["check", "attention", "steps"], choices=PARTS)
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 2048, 8192])
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--text", help="text file for the curves")
    args = parser.parse_args()
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
