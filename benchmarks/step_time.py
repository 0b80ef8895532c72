"""The training step on a CPU beside PyTorch's transformers: T5 1.1 small, batch 8, 128 + 32 tokens, float32, Adafactor.

    pip install -e '.[compare]' && python benchmarks/step_time.py [--rounds=5] [--small_pages] [--layers=8]
        [--binding="Z_LOSS = 0.0"]

Both do forward, backward and Adafactor at the same shapes, without dropout, in turns, each in a process of its own that
sleeps while the others work, a few steps a turn, after one turn each to warm up. The machine's own rate is that of square
float32 products, measured in the same rounds; the model's matrix products alone would take model FLOPs / rate. Medians; other
programs on the machine spoil them. Both use huge pages for large arrays (docs/scale.md, "On a CPU"); --small_pages leaves
them out.
"""

import argparse
import statistics
import time

from turns import Worker, serve

ROWS, INPUTS, TARGETS = 8, 128, 32
SIZE, REPEATS = 2048, 8  # of the products that give the machine's rate


def our_run(layers: int, bindings: list[str]):
    from t5x_lab.runs.config.gin_config import GinConfig

    common = ["TRAIN_STEPS = 1", 'MODEL_DIR = "unused"', 'MIXTURE_OR_TASK_NAME = "c4"', f"BATCH_SIZE = {ROWS}"]
    files = ["models/t5_1_1/small.gin", "objectives/span_corruption.gin"]
    common += [f"TransformerConfig.num_{stack}_layers = {layers}" for stack in ("encoder", "decoder")]
    return GinConfig(files, [*common, 'TransformerConfig.dtype = "float32"', *bindings]).run()


def load_t5x_lab(layers: int, bindings: list[str]):
    import jax

    from t5x_lab.runs.model.sharded_model import ShardedModel
    from t5x_lab.runs.train.assemble import assemble
    from t5x_lab.training.batches import SyntheticBatches

    run = our_run(layers, bindings)
    sharded = ShardedModel(run.model, run.mesh_shape)
    training = assemble(sharded, run.optimizer, batch_size=ROWS, microbatches=1, seed=0)
    state = training.init_state(sharded.init_params(0))
    batches = SyntheticBatches({"inputs": INPUTS, "targets": TARGETS}, ROWS, run.model.network.vocab_size)

    def step() -> None:
        nonlocal state
        state, metrics = training.step(state, sharded.shard_batch(next(batches)))
        jax.block_until_ready((state, metrics))

    return step


def load_transformers(layers: int, unused):
    import numpy as np
    import torch
    import transformers

    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=layers, num_decoder_layers=layers, num_heads=6,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
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


def products(*unused):
    import torch

    x = torch.rand(SIZE, SIZE)

    def step() -> None:
        for _ in range(REPEATS):
            x @ x

    return step


SIDES = {"t5x_lab": load_t5x_lab, "transformers": load_transformers, "products": products}


def turn(step, steps: int) -> float:
    """Median seconds of some steps.

    The first does not count: it finds its memory returned to the system and the caches full of another's data.
    """
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--binding", action="append", default=[], help="further gin bindings for ours")
    parser.add_argument("--layers", type=int, default=8, help="layers of each stack")
    parser.add_argument("--small_pages", action="store_true", help="without huge pages")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        step = SIDES[args.side](args.layers, args.binding)
        serve(lambda line: turn(step, args.steps))
        return

    bindings = [f"--steps={args.steps}", f"--layers={args.layers}", *(f"--binding={binding}" for binding in args.binding)]
    workers = {side: Worker(__file__, f"--side={side}", *bindings, huge_pages=not args.small_pages) for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(args.rounds + 1):
        for side, worker in workers.items():
            seconds = float(worker.ask())
            if round_ >= 1:
                times[side].append(seconds)
    for worker in workers.values():
        worker.close()

    median = {side: statistics.median(values) for side, values in times.items()}
    flops = ROWS * our_run(args.layers, args.binding).model.network.flops(INPUTS, TARGETS)
    rate = REPEATS * 2 * SIZE**3 / median["products"]
    for side in ("t5x_lab", "transformers"):
        beside, share = median[side] / median["transformers"], flops / rate / median[side]
        print(f"{side:<13} {median[side]:.3f} s, {beside:.2f} of transformers' time, {share:.0%} of the product rate")
    print(f"products      {flops / rate:.3f} s for {flops / 1e9:.0f} GFLOP a step at {rate / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
