"""T0's whole training mixture, 38 data sets in 313 templates: start, restore, memory, position and throughput, cached and not.

    python benchmarks/prompts.py [--data=../shared/data] [--scale=1000] [--draws=50000] [--work=FOLDER]
        [--mixture=t0_train] [--only=WAY]

Records are made up, with the fields and the relative sizes of the real ones (train sizes / scale). Each way runs in a process
of its own: seconds and CPU-seconds to the first batch, seconds to a restored one, bytes of the position, memory, and examples a
CPU-second, rendered and tokenised with T5's vocabulary, after the start. The cache is made by `t5x_lab cache`, which is timed.
What the shards of the run draw is counted by task and compared with T0's rates; `p` is the probability of as large a difference
by chance. The last two ways read without one of the replaced functions of TensorFlow in t5x_lab/data/pipeline/patches.py.
Budgets are those of `benchmarks/data_growth.py`: 60 s to the first batch and to restore, 2 GiB, a position of 50 MB.
"""

import argparse
import contextlib
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
GIN = """
TEMPLATES = ("{data}/prompts/promptsource_templates",)
RECORDS = @Records()
Records.files = "{work}/records/{{dataset}}/{{split}}.jsonl"
VOCABULARY = @SentencePieceVocabulary()
SentencePieceVocabulary.path = "{data}/t5_vocabulary/sentencepiece.model"
MIXTURE_OR_TASK_NAME = "{mixture}"
COLLECTIONS = {{"small": @small/Collection()}}
small/Collection.members = ("glue/mrpc", "quail")
TASK_FEATURE_LENGTHS = {{"inputs": 1024, "targets": 256}}
BATCH_SIZE = 64
DataConfig.pack = False
CACHE_DIRS = ("{work}/caches",)
"""


PATCHES = ("single_device_functions", "sequential_maps")
WAYS = ("not cached", "cached", *(f"without {name}" for name in PATCHES))


def write_records(work: pathlib.Path, scale: int) -> int:
    """Made-up records of T0's data sets, in files; returns their number."""
    import synthetic_records

    from t5x_lab.papers.data_sets import T0_TRAIN

    total = 0
    for entry in T0_TRAIN:
        count = max(20, (entry.train or 0) // scale)
        file = work / "records" / entry.name / "train.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = synthetic_records.records(entry.name, count)
        file.write_text("".join(json.dumps(record) + "\n" for record in rows))
        total += count
    return total


def cpu() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def measure(work: pathlib.Path, way: str, draws: int) -> dict:
    """Returns the figures of one of `WAYS` by name, measured in this process."""
    import numpy as np
    import scipy.stats
    from etils import epath

    from t5x_lab.data.pipeline import graph
    from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
    from t5x_lab.runs.config.gin_config import GinConfig

    for name in PATCHES:
        if way == f"without {name}":
            setattr(graph, name, contextlib.nullcontext)
    config = GinConfig([str(work / "t0.gin")], [f"USE_CACHED_TASKS = {way == 'cached'}"]).data()
    figures = {}
    began, cpu_began = time.monotonic(), cpu()
    tasks = resolve_tasks(config, "encoder_decoder", 32_128)
    batches = SeqioBatches(tasks, config, seed=0)
    counts = (next(batches)["task_tokens"] > 0).sum(axis=0)
    figures["first batch, s"], figures["first batch, CPU-s"] = time.monotonic() - began, cpu() - cpu_began
    began, cpu_began, rows = time.monotonic(), cpu(), draws // config.batch_size * config.batch_size
    for _ in range(draws // config.batch_size):
        counts += (next(batches)["task_tokens"] > 0).sum(axis=0)
    figures["examples a CPU-second"] = rows / (cpu() - cpu_began)
    figures["examples a second"] = rows / (time.monotonic() - began)
    rates = np.array([part.rate for part in tasks.train_components])
    expected = rates / rates.sum() * counts.sum()
    figures |= {"draws": int(counts.sum()), "tasks": len(counts), "tasks drawn": int((counts > 0).sum())}
    figures["fewest draws expected"] = float(expected.min())
    figures["chi-squared"], figures["p"] = map(float, scipy.stats.chisquare(counts, expected))
    figures["largest difference, standard deviations"] = float(np.max(np.abs(counts - expected) / np.sqrt(expected)))
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    figures["memory, MiB"] = int(status["RssAnon"].split()[0]) / 1024
    position = epath.Path(work / f"position {way}")
    position.mkdir(parents=True, exist_ok=True)
    batches.save(position)
    figures["position, MB"] = sum(file.stat().st_size for file in pathlib.Path(position).rglob("*") if file.is_file()) / 1e6
    began, cpu_began = time.monotonic(), cpu()
    again = SeqioBatches(resolve_tasks(config, "encoder_decoder", 32_128), config, seed=0)
    again.restore(position)
    next(again)
    figures["restore, s"], figures["restore, CPU-s"] = time.monotonic() - began, cpu() - cpu_began
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--scale", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--mixture", default="t0_train", help="a collection, such as small, of two data sets")
    parser.add_argument("--work")
    parser.add_argument("--only", action="append", choices=WAYS, help="one of the ways, may be repeated (default: all)")
    parser.add_argument("--measure", choices=WAYS, help="one way, in this process")
    args = parser.parse_args()
    work = pathlib.Path(args.work or tempfile.mkdtemp()).resolve()
    if args.measure:
        print(json.dumps(measure(work, args.measure, args.draws)))
        return
    work.mkdir(parents=True, exist_ok=True)
    (work / "t0.gin").write_text(GIN.format(data=pathlib.Path(args.data).resolve(), work=work, mixture=args.mixture))
    print(f"{write_records(work, args.scale):,} records of 38 data sets")
    begun = time.monotonic()
    command = ["cache", f"--gin_file={work}/t0.gin", f"--output_dir={work}/caches"]
    subprocess.run([sys.executable, "-m", "t5x_lab", *command], check=True, capture_output=True)
    print(f"t5x_lab cache: {time.monotonic() - begun:.0f} s for all tasks")
    for way in args.only or WAYS:
        argv = [sys.executable, __file__, f"--work={work}", f"--measure={way}", f"--draws={args.draws}"]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        print(f"{way}:")
        for name, value in json.loads(done.stdout.splitlines()[-1]).items():
            print(f"  {name:40} {value:10,.{3 if name == 'p' else 1}f}")


if __name__ == "__main__":
    main()
