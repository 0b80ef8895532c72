"""Cost of fine-tuning methods: compiled memory of T5 1.1 XL on a TPU v4 slice, and steps of T5 1.1 small on this CPU.

    pip install libtpu && python benchmarks/ways_to_fine_tune.py [--rounds=5] [--only=memory] [--only=steps] [--layers=1]

All parameters, adapter layers of size 64 with the norms, LoRA of rank 8 on queries and values, a soft prompt of 100 vectors.

Memory is of one chip of eight, parameters split over all, 64 rows of 512 + 128 tokens, with Adafactor and with AdamW. Steps, of
8 rows of 128 + 32 tokens in float32, are made in turns by processes that sleep while the others work; medians, as shares of the
time that all parameters take.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from turns import Worker, serve

WAYS = {
    "all": [],
    "adapters": ["peft/adapters.gin"],
    "LoRA": ["peft/lora.gin"],
    "soft prompt": ["peft/soft_prompt.gin"],
}
BASE = 2_849_757_184  # parameters of T5 1.1 XL
ROWS, INPUTS, TARGETS = 8, 128, 32
TURN = 4  # steps


def memory(way: str, optimizer: str) -> dict:
    flags = [
        "--topology=v4:2x2x2", "--gin_file=models/t5_1_1/xl.gin", "--gin_file=runs/finetune.gin", "--gin_file=meshes/fsdp.gin",
        *(f"--gin_file={file}" for file in WAYS[way]), "--gin.MIXTURE_OR_TASK_NAME=t5_squad",
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 512, "targets": 128}', "--gin.BATCH_SIZE=64", "--gin.MODEL_DIR=unused",
        "--gin.TRAIN_STEPS=1", f"--gin.OPTIMIZER=@{optimizer}()", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-m", "t5x_lab", "compile", *flags]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def show_memory() -> None:
    print("| XL, GiB a chip | arguments | temporaries | peak | parameters that learn |\n|---|---|---|---|---|")
    for optimizer in ("Adafactor", "AdamW"):
        for way in WAYS:
            report = memory(way, optimizer)
            sizes = [report["bytes_per_device"][name] / 2**30 for name in ("arguments", "temporaries", "peak")]
            learn = report["num_parameters"] - (0 if way == "all" else BASE)
            cells = " | ".join(f"{size:.2f}" for size in sizes)
            print(f"| {way}, {optimizer} | {cells} | {learn:,}{' and norms' if way == 'adapters' else ''} |", flush=True)


def steps_of(way: str, layers: int):
    import jax

    from t5x_lab.runs.config.gin_config import GinConfig
    from t5x_lab.runs.model.sharded_model import ShardedModel
    from t5x_lab.runs.train.assemble import assemble
    from t5x_lab.training.batches import SyntheticBatches

    needed = ["TRAIN_STEPS = 1", 'MODEL_DIR = "unused"', 'MIXTURE_OR_TASK_NAME = "t5_squad"', f"BATCH_SIZE = {ROWS}"]
    lengths = f'TASK_FEATURE_LENGTHS = {{"inputs": {INPUTS}, "targets": {TARGETS}}}'
    files = ["models/t5_1_1/small.gin", "runs/finetune.gin", *WAYS[way]]
    needed += [f"TransformerConfig.num_{stack}_layers = {layers}" for stack in ("encoder", "decoder")]
    run = GinConfig(files, [*needed, lengths, 'TransformerConfig.dtype = "float32"', "DROPOUT_RATE = 0.0"]).run()
    sharded = ShardedModel(run.model, run.mesh_shape)
    training = assemble(sharded, run.optimizer, batch_size=ROWS, microbatches=1, seed=0, trainable=run.trainable)
    state = training.init_state(sharded.init_params(0))
    batches = SyntheticBatches({"inputs": INPUTS, "targets": TARGETS}, ROWS, run.model.network.vocab_size)

    def turn(unused: str) -> float:
        nonlocal state
        seconds = []
        for _ in range(TURN):
            began = time.perf_counter()
            state, metrics = training.step(state, sharded.shard_batch(next(batches)))
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])

    return turn


def show_steps(rounds: int, layers: int) -> None:
    workers = {way: Worker(__file__, f"--way={way}", f"--layers={layers}") for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):
        for way, worker in workers.items():
            seconds = float(worker.ask())
            if round_:
                times[way].append(seconds)
    for worker in workers.values():
        worker.close()
    of_all = statistics.median(times["all"])
    for way, seconds in times.items():
        print(f"a step of {way:<12} {statistics.median(seconds) / of_all:.2f} of the time of all parameters ({of_all:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=("memory", "steps"))
    parser.add_argument("--layers", type=int, default=8, help="layers of each stack with --only=steps")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        serve(steps_of(args.way, args.layers))
        return
    if "steps" in (args.only or ["steps"]):
        show_steps(args.rounds, args.layers)
    if "memory" in (args.only or ["memory"]):
        show_memory()


if __name__ == "__main__":
    main()
