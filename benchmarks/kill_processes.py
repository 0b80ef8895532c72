"""Kills runs of one and of two processes, of one and of several devices each, and starts them again as another of these.

Every start is of another shape, drawn at random, on a mesh with all of its devices. Now and then one process of two is killed
alone, and the other must end by itself. In the end the run must have read what a run that was never killed has read, token for
token, with the same losses but for the order of float32 sums on different meshes; and none may ever hang.

    python benchmarks/kill_processes.py --kills=200
"""

import argparse
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import commands

from t5x_lab.observe.metrics import read_metrics

SHAPES = [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (2, 4)]  # processes, devices of each
RUN = [
    "train", "--gin_file=models/decoder/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", "--gin.DATA_SHARDS=2",
    '--gin.TASK_FEATURE_LENGTHS={"targets": 64}', "--gin.VOCABULARY=@ByteVocabulary()", "--gin.BATCH_SIZE=8",
    "--gin.TransformerConfig.vocab_size=384", "--gin.TransformerConfig.emb_dim=32", "--gin.TransformerConfig.mlp_dim=64",
    "--gin.TransformerConfig.head_dim=8", '--gin.TransformerConfig.dtype="float32"', "--gin.CHECKPOINT_PERIOD=5",
    "--gin.EVAL_PERIOD=1000000", "--gin.DataConfig.shuffle_buffer_size=20", '--gin.LearningRate.factors="constant"',
    "--gin.LearningRate.base_learning_rate=1e-3",
]  # fmt: skip
LIMIT = 180  # seconds until a process counts as hanging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds between the first new step and the kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "cache")
        kills = {shape: 0 for shape in SHAPES}
        alone, before, lost = 0, (0, 0), []
        for kill in range(args.kills):
            shape = rng.choice([other for other in SHAPES if other != before])
            processes, before = start(shape, "killed", 10**7), shape
            first = last_step("killed")
            began = time.monotonic()
            while all(process.is_running() for process in processes) and last_step("killed") <= first:
                check(time.monotonic() - began < LIMIT, f"No step in {LIMIT} s.", processes)
                time.sleep(0.05)
            time.sleep(rng.random() * args.longest)
            check(all(process.is_running() for process in processes), "The run ended by itself.", processes)
            if len(processes) == 2 and rng.random() < 0.1:
                alone += 1
                rng.choice(processes).kill()
            else:
                for process in processes:
                    process.kill()
            for process in processes:
                try:
                    process.wait(LIMIT)
                except TimeoutError:
                    check(False, f"A process did not end in {LIMIT} s.", processes)
            commands.end_all()
            kills[shape] += 1
            lost.append(last_step("killed") - latest_checkpoint())
            if (kill + 1) % 10 == 0:
                print(f"{kill + 1} kills, step {last_step('killed')}", flush=True)
        steps = last_step("killed") + 5
        for directory in ("killed", "whole"):
            (process,) = start((1, 1), directory, steps)
            check(process.wait() == 0, "The last run failed.", [process])
        a, b = lines("whole"), lines("killed")
        different = [step for step in a if a[step][1:] != b.get(step, ())[1:]]
        off = max(abs(a[step][0] - b[step][0]) / a[step][0] for step in a if step in b)
        print(
            f"{args.kills} kills, of (processes, devices of each): {kills}; {alone} of one process of two alone\n"
            f"steps done again after a kill: {sum(lost)}, at most {max(lost)}; a save every 5 steps; no process hung\n"
            f"{len(a)} steps, {len(b)} in the stitched run; tokens differ in {len(different)} of them, losses by {off:.1e}"
        )
        sys.exit(bool(different) or len(a) != len(b) or off > 1e-4)


def start(shape: tuple[int, int], model_dir: str, steps: int) -> list[commands.Command]:
    processes, devices = shape
    mesh = {1: "data=1", 2: "fsdp=2", 4: "data=2,fsdp=2", 8: "data=2,fsdp=2,tensor=2"}[processes * devices]
    argv = [*RUN, f"--gin.MODEL_DIR={model_dir}", f"--gin.TRAIN_STEPS={steps}", f"--gin.MESH={mesh}"]
    for log in pathlib.Path().glob("*log"):
        log.unlink()
    if processes == 2:
        return commands.start_two(*argv, devices=devices)
    flags = f"{commands.ON_ONE_DEVICE['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return [commands.Command(*argv, environment={"XLA_FLAGS": flags, "NPROC": None})]


def check(holds: bool, message: str, processes: list[commands.Command]) -> None:
    if not holds:
        outputs = [process.output()[-3000:] for process in processes]
        commands.end_all()
        sys.exit("\n".join([message, *outputs]))


def lines(model_dir: str) -> dict[int, tuple]:
    names = ("loss", "tokens_processed", "raw_tokens")
    return {line["step"]: tuple(line[name] for name in names) for line in read_metrics(model_dir) if line["split"] == "train"}


def last_step(model_dir: str) -> int:
    return max(lines(model_dir), default=0) if pathlib.Path(model_dir, "metrics.jsonl").exists() else 0


def latest_checkpoint() -> int:
    return max((int(entry.name) for entry in pathlib.Path("killed/checkpoints").glob("*") if entry.name.isdigit()), default=0)


if __name__ == "__main__":
    main()
