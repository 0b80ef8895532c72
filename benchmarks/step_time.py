"""The training step on a CPU beside PyTorch's transformers: T5 1.1 small, batch 8, 128 + 32 tokens, float32, Adafactor.

    pip install -e '.[compare]' && python benchmarks/step_time.py [--rounds=9] [--threads=2]

Both do forward, backward and Adafactor at the same shapes, without dropout, in turns in one process, after two steps each to
warm up. The machine's own rate is that of square float32 products, measured between them; the model's matrix products alone
would take model FLOPs / rate. Medians; other programs on the machine spoil them.
"""

import argparse
import statistics
import time

import jax
import numpy as np
import torch
import transformers

from t5x_lab.networks.flops import flops_per_example
from t5x_lab.runs.assemble import Placed, assemble
from t5x_lab.runs.config import GinConfig
from t5x_lab.training.batches import SyntheticBatches

ROWS, INPUTS, TARGETS = 8, 128, 32


def ours(bindings: list[str]):
    """(function that takes a step, model FLOPs of a step)"""
    common = ["TRAIN_STEPS = 1", 'MODEL_DIR = "unused"', 'MIXTURE_OR_TASK_NAME = "c4"', f"BATCH_SIZE = {ROWS}"]
    files = ["models/t5_1_1/small.gin", "objectives/span_corruption.gin"]
    run = GinConfig(files, [*common, 'TransformerConfig.dtype = "float32"', *bindings]).run()
    placed = Placed(run.model, run.mesh_shape)
    training = assemble(placed, run.optimizer, batch_size=ROWS, microbatches=1, seed=0)
    state = training.start(placed.init_params(0))
    batches = SyntheticBatches({"inputs": INPUTS, "targets": TARGETS}, ROWS, run.model.network.vocab_size)

    def step() -> None:
        nonlocal state
        state, metrics = training.step(state, placed.put(next(batches)))
        jax.block_until_ready((state, metrics))

    return step, ROWS * flops_per_example(run.model.network, INPUTS, TARGETS)


def theirs():
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_decoder_layers=8, num_heads=6, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    model.train()
    optimizer = transformers.Adafactor(model.parameters(), lr=1e-3, scale_parameter=True, relative_step=False)
    rng = np.random.default_rng(0)

    def step() -> None:
        inputs, labels = (torch.from_numpy(rng.integers(2, 32128, (ROWS, length))) for length in (INPUTS, TARGETS))
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())

    return step


def product_rate(size: int = 2048) -> float:
    """FLOP/s of square float32 products."""
    x = torch.rand(size, size)
    began = time.perf_counter()
    for _ in range(8):
        x @ x
    return 8 * 2 * size**3 / (time.perf_counter() - began)


def seconds(step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; JAX takes the cores it is allowed")
    parser.add_argument("--binding", action="append", default=[], help='further gin bindings for ours, such as "Z_LOSS = 0.0"')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (our_step, flops), their_step = ours(args.binding), theirs()
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "rate": []}
    for round_ in range(args.rounds + 2):
        found = {"ours": seconds(our_step), "theirs": seconds(their_step), "rate": product_rate()}
        if round_ >= 2:
            for name, value in found.items():
                times[name].append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    bound = flops / median["rate"]
    print(f"t5x_lab       {median['ours']:.3f} s   {median['ours'] / median['theirs']:.2f} of transformers' time")
    print(f"transformers  {median['theirs']:.3f} s")
    print(f"products      {bound:.3f} s at {median['rate'] / 1e9:.0f} GFLOP/s, {flops / 1e9:.0f} GFLOP a step")
    print(f"share of the product rate: t5x_lab {bound / median['ours']:.0%}, transformers {bound / median['theirs']:.0%}")


if __name__ == "__main__":
    main()
