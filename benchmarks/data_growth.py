"""Scaling of the input pipeline: start-up time, memory, bytes of saved position and examples per CPU-second.

One quantity grows at a time: documents, files, shards, tasks. Each point is a process of its own, which reports CPU-seconds
until its batches are built, until the first batch and until a saved position is restored; memory beyond an idle process; bytes
of position; and examples per CPU-second once it runs. Of 64 shards it reads four, as one of 16 hosts, or all of them. Tasks
are templates over 38 data sets of TFRecords, as T0's 313 are.

Usage: python benchmarks/data_growth.py [--only=tasks] [--most=313] [--out=data_growth]
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

GROWTHS = {
    "documents": [1_000, 10_000, 100_000, 1_000_000],
    "files": [1, 4, 64, 1_024],
    "shards": [1, 4, 64, 256],
    "shards_of_one_process": [1, 4, 16],
    "tasks": [1, 10, 100, 313],
}
USUAL = {"documents": 10_000, "files": 4, "shards": 4, "shards_of_one_process": 4, "tasks": 1}
DATA_SETS = 38
MEASURES = {
    "build": "CPU-seconds to build",
    "first_batch": "CPU-seconds from there to the first batch",
    "seconds": "seconds to the first batch",
    "resume": "CPU-seconds to restore a position",
    "memory": "MiB beyond an idle process",
    "position": "MiB of position",
    "examples": "examples per CPU-second",
}


def text_of(folder: pathlib.Path, documents: int, files: int) -> str:
    """A pattern of .jsonl files of short documents."""
    for file in range(files):
        lines = (
            json.dumps({"text": f"document {n} is about {n % 97} and {n % 89} " * 4}) for n in range(file, documents, files)
        )
        (folder / f"{file:04d}.jsonl").write_text("\n".join(lines))
    return f"{folder}/*.jsonl"


def templates(folder: pathlib.Path, tasks: int, documents: int) -> str:
    """A mixture of templates over data sets; returns its name."""
    import seqio
    import tensorflow as tf

    spec = {name: tf.io.FixedLenFeature([], tf.string) for name in ("question", "answer")}
    for number in range(min(tasks, DATA_SETS)):
        with tf.io.TFRecordWriter(f"{folder}/{number}.tfrecord") as file:
            for n in range(documents // DATA_SETS):
                texts = {
                    "question": f"question {n} of data set {number}: what is it about, and who says so?",
                    "answer": f"answer {n}",
                }
                of_bytes = lambda text: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
                features = tf.train.Features(feature={name: of_bytes(text) for name, text in texts.items()})
                file.write(tf.train.Example(features=features).SerializeToString())

    def put_into_words(number):
        def render(example):
            return {"inputs": tf.strings.join([f"template {number}: ", example["question"]]), "targets": example["answer"]}

        return lambda dataset: dataset.map(render, num_parallel_calls=tf.data.AUTOTUNE)

    feature = seqio.Feature(seqio.ByteVocabulary(extra_ids=100))
    for number in range(tasks):
        data_set = number % DATA_SETS
        source = seqio.TFExampleDataSource({"train": f"{folder}/{data_set}.tfrecord"}, spec)
        steps = [put_into_words(number), seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
        steps.append(seqio.preprocessors.append_eos_after_trim)
        features = {"inputs": feature, "targets": feature}
        seqio.TaskRegistry.add(f"template{number}", source, preprocessors=steps, output_features=features)
    seqio.MixtureRegistry.add("templates", [f"template{number}" for number in range(tasks)], default_rate=1.0)
    return "templates"


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    documents: int, files: int, shards: int, shards_of_one_process: int, tasks: int, of_templates: bool
) -> dict[str, float]:
    """One point, in this process."""
    from etils import epath

    import t5x_lab.tasks  # noqa: F401  (registers tasks and data sets)
    from t5x_lab.data.config import DataConfig, TextFiles
    from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
    from t5x_lab.data.vocabularies.config import ByteVocabulary
    from t5x_lab.training.batches import Rows

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text, lengths, more = "files_span_corruption", {"inputs": 128}, {}
        if of_templates:
            text, lengths = templates(folder, tasks, documents), {"inputs": 128, "targets": 32}
        else:
            more = {"files": TextFiles(train=text_of(folder, documents, files))}
        shards = max(shards, shards_of_one_process)
        config = DataConfig(text, lengths, 4 * shards, ByteVocabulary(), shards=shards, **more)
        held = np.arange(4 * min(shards, shards_of_one_process))
        idle, began, wall = memory(), time.process_time(), time.monotonic()
        batches = SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, 0, lambda size: Rows(held, held))
        built = time.process_time()
        next(batches)
        first, seconds = time.process_time(), time.monotonic() - wall
        rows, begun = 0, time.process_time()
        while time.process_time() - begun < 5.0:
            rows += int((next(batches)["encoder_segment_ids"].max(1)).sum())
        rate = rows / (time.process_time() - begun)
        (folder / "position").mkdir()
        saved = batches.save(epath.Path(folder / "position"))
        position = sum(pathlib.Path(file).stat().st_size for file in saved) / 2**20
        peak = memory()
        begun = time.process_time()
        for other in set(range(shards)) - set(range(shards_of_one_process)):  # which other processes would have saved
            (folder / "position" / f"shard_{other}.index").touch()
        batches.restore(epath.Path(folder / "position"), epath.Path(folder))
        next(batches)
        return {
            "build": built - began,
            "first_batch": first - built,
            "seconds": seconds,
            "resume": time.process_time() - begun,
            "memory": peak - idle,
            "position": position,
            "examples": rate,
        }


def plot(points: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    growths = list(dict.fromkeys(point["growth"] for point in points))
    figure, axes = plt.subplots(len(MEASURES), len(growths), figsize=(4 * len(growths), 2.4 * len(MEASURES)), squeeze=False)
    for column, growth in enumerate(growths):
        selected = [point for point in points if point["growth"] == growth]
        for line, (name, title) in enumerate(MEASURES.items()):
            axis = axes[line][column]
            axis.plot([point[growth] for point in selected], [point[name] for point in selected], marker="o")
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
            axis.set_title(f"{title}, by {growth}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GROWTHS, help="one quantity alone")
    parser.add_argument("--most", type=int, default=10**9, help="no larger sizes")
    parser.add_argument("--out", default="data_growth", help="where the points and the plot go: OUT.jsonl, OUT.png")
    parser.add_argument("--point", help="(one process's work)")
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(**json.loads(args.point))))
        return
    points = []
    for growth, sizes in GROWTHS.items():
        for size in sizes:
            if (args.only and growth != args.only) or size > args.most:
                continue
            point = {**USUAL, growth: size, "of_templates": growth == "tasks"}
            point["shards_of_one_process"] = size if growth == "shards_of_one_process" else min(4, point["shards"])
            command = [sys.executable, __file__, f"--point={json.dumps(point)}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            points.append({"growth": growth, **point, **json.loads(done.stdout.splitlines()[-1])})
            result = "  ".join(f"{name} {points[-1][name]:.4g}" for name in MEASURES)
            print(f"{growth:>10} {size:>9,}: {result}", flush=True)
    pathlib.Path(f"{args.out}.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    plot(points, f"{args.out}.png")


if __name__ == "__main__":
    main()
