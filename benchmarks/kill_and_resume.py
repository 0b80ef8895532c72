"""Kills a training run with SIGKILL at random moments and checks that nothing but time was lost.

A run with asynchronous saves every few steps is started again and again and killed after a random time, between saves and
during them, until it has been killed `--kills` times; then it is left to finish. Every restart must continue from a whole
checkpoint, and loss, gradient norm and token counts of every step must equal those of a run that was never killed.

    python benchmarks/kill_and_resume.py --source=seqio --kills=20
    python benchmarks/kill_and_resume.py --source=synthetic --kills=200

`synthetic` trains in a process that never imports TensorFlow, on random tokens; `seqio` is `t5x_lab train` on the embedded
corpus.
"""

import argparse
import collections
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from t5x_lab.observe.metrics import JsonLines, read_metrics

SEQIO = [
    "-m", "t5x_lab", "train",
    "--gin_file=models/t5_1_1/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=sotu_span_corruption",
    '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 24}', "--gin.VOCABULARY=@ByteVocabulary()",
    "--gin.TransformerConfig.vocab_size=384", '--gin.TransformerConfig.dtype="float32"', "--gin.DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.DataConfig.shuffle_buffer_size=50", "--gin.CHECKPOINT_PERIOD=5", "--gin.EVAL_PERIOD=1000000",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=("seqio", "synthetic"), default="seqio")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds between the first new step and the kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)  # directory and steps: what the synthetic source runs
    args = parser.parse_args()
    if args.train:
        return train_on_synthetic(args.train[0], int(args.train[1]))
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = (os.path.join(folder, name) for name in ("whole", "killed"))
        could_continue, continued, lost, during_save = 0, 0, [], 0
        for kill in range(args.kills):
            log = pathlib.Path(folder, "log")
            process = start(args.source, killed, 10**7, log)
            before, could_continue = last_step(killed), could_continue + (latest_checkpoint(killed) > 0)
            while process.poll() is None and last_step(killed) <= before:
                time.sleep(0.02)
            time.sleep(rng.random() * args.longest)
            if process.poll() is not None:
                sys.exit(f"The run ended by itself before kill {kill + 1}: {log.read_text()[-2000:]}")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            continued += bool(re.search("Continuing after step", log.read_text()))
            during_save += any("tmp" in entry.name for entry in pathlib.Path(killed, "checkpoints").glob("*"))
            lost.append(last_step(killed) - latest_checkpoint(killed))
            if (kill + 1) % 20 == 0:
                print(f"{kill + 1} kills, step {last_step(killed)}", flush=True)
        steps = last_step(killed) + 20
        for directory in (killed, whole):
            log = pathlib.Path(folder, "last.log")
            if start(args.source, directory, steps, log).wait():
                sys.exit(log.read_text()[-2000:])
        a, b = lines(whole), lines(killed)
        different = [step for step in a if a[step] != b.get(step)]
        print(
            f"{args.kills} kills, {during_save} of them during a save; {continued} of {could_continue} restarts that found "
            f"a checkpoint continued from it\nsteps done again after a kill: {sum(lost)}, at most {max(lost)} "
            f"(how often: {dict(sorted(collections.Counter(lost).items()))}); a save every 5 steps\n"
            f"{len(a)} steps, {len(b)} in the stitched run, {len(different)} of them different"
        )
        sys.exit(bool(different) or len(a) != len(b) or len(a) != steps or continued != could_continue)


def start(source: str, model_dir: str, steps: int, log: pathlib.Path) -> subprocess.Popen:
    if source == "synthetic":
        command = [sys.executable, __file__, "--train", model_dir, str(steps)]
    else:
        command = [sys.executable, *SEQIO, f"--gin.MODEL_DIR={model_dir}", f"--gin.TRAIN_STEPS={steps}"]
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def train_on_synthetic(model_dir: str, steps: int) -> None:
    """The core on random tokens: the loop, the asynchronous saves and the metrics of `t5x_lab train`, and nothing else."""
    from t5x_lab.checkpoints.config import SaveCheckpointConfig
    from t5x_lab.checkpoints.layout import finished_steps
    from t5x_lab.checkpoints.manager import Checkpoints
    from t5x_lab.checkpoints.saving import Saver
    from t5x_lab.models.config import ModelConfig
    from t5x_lab.networks.transformer import TransformerConfig
    from t5x_lab.optim.optimizers import Adafactor
    from t5x_lab.partitioning.mesh import MeshShape
    from t5x_lab.runs.model.sharded_model import ShardedModel
    from t5x_lab.runs.train.assemble import assemble
    from t5x_lab.training.batches import SyntheticBatches
    from t5x_lab.training.hooks import RunStart
    from t5x_lab.training.loop import Action, Budget, train

    network = TransformerConfig(
        "encoder_decoder", 128, 32, 4, 8, 64, num_decoder_layers=2, num_encoder_layers=2, dropout_rate=0.1, dtype="float32"
    )
    sharded = ShardedModel(ModelConfig(network), MeshShape())
    training = assemble(sharded, Adafactor(min_dim_size_to_factor=16), batch_size=8, microbatches=1, seed=0)
    batches = SyntheticBatches({"inputs": 24, "targets": 16}, 8, 128)
    os.makedirs(model_dir, exist_ok=True)
    checkpoints = Checkpoints(model_dir, SaveCheckpointConfig(period=5))
    saved = finished_steps(model_dir)
    if saved:
        print(f"Continuing after step {saved[-1]}")
        state = checkpoints.restore(saved[-1], training.abstract_state, batches)
    else:
        state = training.init_state(sharded.init_params(0))
    lines = JsonLines()
    lines.on_start(RunStart(model_dir, int(state.step), steps))
    drop = lambda metrics: {name: value for name, value in metrics.items() if name != "task_tokens"}
    saver = Saver(checkpoints, SaveCheckpointConfig(period=5), batches)
    train(
        state,
        batches,
        training.step,
        shard_batch=sharded.shard_batch,
        budget=Budget(steps),
        record=lambda step, metrics: lines.on_step(step, drop(metrics)),
        actions=[Action(saver.save, saver.due, at_stop=True)],
    )
    saver.finish()
    checkpoints.close()
    lines.on_end(None)
    assert "tensorflow" not in sys.modules


def lines(model_dir: str) -> dict[int, tuple]:
    names = ("loss", "grad_norm", "tokens_processed", "raw_tokens")
    return {line["step"]: tuple(line[name] for name in names) for line in read_metrics(model_dir) if line["split"] == "train"}


def last_step(model_dir: str) -> int:
    """The last step in the metrics; read from the end, for the file grows long."""
    path = pathlib.Path(model_dir, "metrics.jsonl")
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - 5000, 0))
        steps = re.findall(rb'\{"step": (\d+), .*\}\n', file.read())
    return int(steps[-1]) if steps else 0


def latest_checkpoint(model_dir: str) -> int:
    folder = pathlib.Path(model_dir, "checkpoints")
    return max((int(entry.name) for entry in folder.glob("*") if entry.name.isdigit()), default=0)


if __name__ == "__main__":
    main()
