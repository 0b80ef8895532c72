"""Cost of checkpoints: step time, bandwidth compared with `cp`, time to resume, memory of conversion.

    python benchmarks/checkpoints.py [--model=models/t5_1_1/small.gin]

Prints medians; each ratio is of two things timed side by side in this run. Nothing else should run on the machine.
"""

import argparse
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from etils import epath

from t5x_lab.checkpoints.checksums import checksums
from t5x_lab.checkpoints.config import SaveCheckpointConfig
from t5x_lab.checkpoints.formats.location import find, open_as_saved
from t5x_lab.checkpoints.layout import named_leaves
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.data.config import DataConfig
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.training.batches import SyntheticBatches

ROUNDS = 5
STEPS = (10, 100, 1_000, 10_000)
TINY = "models/t5_1_1/tiny.gin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/t5_1_1/small.gin")
    parser.add_argument("--only", choices=("saving", "resuming", "converting"), help="one part of it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if args.only in (None, "saving"):
            saving(args.model, folder)
        if args.only in (None, "resuming"):
            resuming(folder)
        if args.only in (None, "converting"):
            converting(args.model, folder)


def timed(function, *args) -> float:
    """Seconds that a call takes, its arrays included."""
    begin = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - begin


def saving(model: str, folder: pathlib.Path) -> None:
    sharded = ShardedModel(GinConfig((model,)).model(), MeshShape())
    training = assemble(sharded, Adafactor(), batch_size=8, microbatches=1, seed=0)
    batches = SyntheticBatches({"inputs": 128, "targets": 32}, 8, sharded.model.config.network.vocab_size)
    state = training.init_state(sharded.init_params(0))
    step = lambda state: training.step(state, sharded.shard_batch(next(batches)))[0]
    state = step(step(state))
    checkpoints = Checkpoints(folder / "run", SaveCheckpointConfig(keep=1))
    number, plain, calls, beside, sums = 0, [], [], [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        state = jax.block_until_ready(step(state))
        plain.append(time.perf_counter() - begin)
        number += 1
        sums.append(timed(lambda: checksums(named_leaves({"params": state.params, "opt_state": state.opt_state}))))
        calls.append(timed(lambda: checkpoints.save(number, state, batches)))
        begin = time.perf_counter()
        while checkpoints.is_busy():
            state = jax.block_until_ready(step(state))
            beside.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        checkpoints.wait()
    a, call, slower = map(statistics.median, (plain, calls, beside or plain))
    print(f"a step                        {a:.3f} s; {slower / a:.2f} of that while a save is under way (it shares the cores)")
    print(
        f"the loop waits for a save     {call:.3f} s ({call / a:.2f} of a step), {statistics.median(sums):.3f} s for checksums"
    )

    saved = lambda number: folder / "run" / "checkpoints" / str(number)  # the only one that is kept
    size = sum(file.stat().st_size for file in saved(number).rglob("*") if file.is_file())
    in_memory = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    copies, saves, restores = [], [], []
    for i in range(ROUNDS):
        shutil.rmtree(folder / "copy", ignore_errors=True)
        copies.append(timed(lambda: subprocess.run(["cp", "-r", saved(number + i), folder / "copy"], check=True)))
        subprocess.run(["sync"], check=True)

        def save(number=number + 1 + i):
            checkpoints.save(number, state, batches)
            checkpoints.wait()

        saves.append(timed(save))
        restores.append(timed(lambda: checkpoints.restore(number + 1 + i, training.abstract_state, None)))
    cp, save_time, restore_time = map(statistics.median, (copies, saves, restores))
    print(
        f"{size / 2**20:.0f} MiB of files for {in_memory / 2**20:.0f} MiB of arrays: cp {size / cp / 2**20:.0f} MiB/s, "
        f"save {in_memory / save_time / 2**20:.0f} MiB/s ({save_time / cp:.1f} of cp's time), restore with verification "
        f"{in_memory / restore_time / 2**20:.0f} MiB/s ({restore_time / cp:.1f})"
    )
    checkpoints.close()


def resuming(folder: pathlib.Path) -> None:
    from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks

    data = DataConfig("sotu_span_corruption", {"inputs": 64, "targets": 24}, 8, ByteVocabulary(), shuffle_buffer_size=100)
    tasks = resolve_tasks(data, "encoder_decoder", 384)
    batches = SeqioBatches(tasks, data, seed=0)
    times = {}
    for step in range(1, 10_002):
        batch = next(batches)
        if step - 1 in STEPS:  # the one after the position that was saved
            times[step - 1] = [one_resume(tasks, data, folder / str(step - 1), batch) for _ in range(ROUNDS)]
        if step in STEPS:
            (folder / str(step)).mkdir()
            batches.save(epath.Path(folder / str(step)))
    medians = {step: statistics.median(times[step]) for step in STEPS}
    print("a SeqIO pipeline resumed      " + ", ".join(f"at step {step:,} in {t:.2f} s" for step, t in medians.items()))


def one_resume(tasks, data: DataConfig, position: pathlib.Path, expected: dict) -> float:
    from t5x_lab.data.pipeline.batches import SeqioBatches

    begin = time.perf_counter()
    batches = SeqioBatches(tasks, data, seed=0)
    batches.restore(epath.Path(position), epath.Path(position))
    batch = next(batches)
    assert all(np.array_equal(batch[name], expected[name]) for name in expected)
    return time.perf_counter() - begin


def converting(model: str, folder: pathlib.Path) -> None:
    """Beside a model of two megabytes, which needs the same programs and no memory to speak of."""
    peaks: dict[str, list[int]] = {}
    for number, name in enumerate((TINY, model)):
        run, hf, back = (str(folder / f"{part}{number}") for part in ("run", "hf", "back"))
        make = f"import t5x_lab; t5x_lab.from_gin([{name!r}]).save({run!r})"
        subprocess.run([sys.executable, "-c", make], check=True, capture_output=True)
        for label, source, target, to in (("t5x_lab to Hugging Face", run, hf, "hf"), ("and back", hf, back, "t5x_lab")):
            code = (
                "from t5x_lab.checkpoints.formats.location import find; from t5x_lab.runs.convert.convert import convert\n"
                f"convert(find({source!r}), {target!r}, {to!r})"
            )
            peaks.setdefault(label, []).append(peak_of(code))
    size = sum(file.stat().st_size for file in (folder / "hf1").iterdir())
    largest = max(leaf.nbytes for leaf in open_as_saved(find(str(folder / "hf1"))).values())
    for label, (small, large) in peaks.items():
        more = (large - small) / 2**20
        print(
            f"{label:<29} {size / 2**20:.0f} MiB, the largest tensor {largest / 2**20:.0f}: {more:.0f} MiB more than a tiny one"
        )


def peak_of(code: str) -> int:
    """Bytes that a process has at the most, files it maps not counted."""
    watch = """
import re, threading, time
peak = [0]
def look():
    while True:
        with open("/proc/self/status") as file:
            peak[0] = max(peak[0], int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1]))
        time.sleep(0.005)
threading.Thread(target=look, daemon=True).start()
"""
    out = subprocess.run([sys.executable, "-c", f"{watch}{code}\nprint(peak[0])"], check=True, capture_output=True, text=True)
    return int(out.stdout.split()[-1]) * 1024


if __name__ == "__main__":
    main()
