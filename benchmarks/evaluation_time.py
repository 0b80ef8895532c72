"""Overhead of the first and of later evaluations during training, of this checkout and optionally of others.

    python benchmarks/evaluation_time.py [--trees=.,/path/to/another/checkout] [--rounds=3]

A small encoder-decoder trains on span corruption and on a task with metrics of its own, and evaluates both after every step:
four batches of the loss, and 16 examples that are written and scored. Seconds from a step's end to the end of its evaluation,
which is nearly all building, reading and compiling; each tree in turn.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

MODULE = '''
import json, time
import gin, seqio, tensorflow as tf
import t5x_lab.tasks

@gin.configurable
class Times:
    """Notes when steps and evaluations end."""

    def on_step(self, step, metrics):
        self.write(step, "step")

    def on_evaluation(self, step, split, metrics):
        self.write(step, split)

    def write(self, step, what):
        with open("times.jsonl", "a") as file:
            file.write(json.dumps([step, what, time.monotonic()]) + "\\n")

def exact(targets, predictions):
    return {"exact": sum(a == b for a, b in zip(targets, predictions)) / len(targets)}

def mean_score(targets, scores):
    return {"mean_score": float(sum(scores) / len(scores))}

vocabulary = seqio.ByteVocabulary(100)
seqio.TaskRegistry.add(
    "words",
    seqio.TextLineDataSource({"train": "words.txt", "validation": "words.txt"}),
    preprocessors=[
        lambda data: data.map(lambda line: {"inputs": line, "targets": tf.strings.substr(line, 0, 4)}),
        seqio.preprocessors.tokenize, seqio.preprocessors.append_eos,
    ],
    output_features={name: seqio.Feature(vocabulary) for name in ("inputs", "targets")},
    metric_fns=[exact, mean_score],
)
seqio.MixtureRegistry.add("both", [("sotu_span_corruption", 1.0), ("words", 1.0)])
'''
FLAGS = [
    "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_bindings=import timed", "--gin.MIXTURE_OR_TASK_NAME=both",
    '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 24}', "--gin.VOCABULARY=@ByteVocabulary()", "--gin.BATCH_SIZE=8",
    "--gin.TransformerConfig.vocab_size=384", '--gin.TransformerConfig.dtype="float32"', "--gin.DATA_SHARDS=1",
    "--gin.HOOKS=(@Times(),)", "--gin.EVAL_PERIOD=1", "--gin.INFER_EVAL_PERIOD=1", "--gin.DataConfig.eval_steps=4",
    "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=8", "--gin.CHECKPOINT_PERIOD=1000",
]  # fmt: skip


def times(tree: str) -> list[float]:
    """Seconds of the evaluation after each step."""
    tree = str(pathlib.Path(tree).resolve())
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "timed.py").write_text(MODULE)
        pathlib.Path(folder, "words.txt").write_text("".join(f"word number {n}\n" for n in range(16)))
        environment = {**os.environ, "PYTHONPATH": tree, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run([sys.executable, "-m", "t5x_lab", *FLAGS], cwd=folder, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        noted = [json.loads(line) for line in pathlib.Path(folder, "times.jsonl").read_text().splitlines()]
    began = {step: at for step, event, at in noted if event == "step"}
    ended = {step: at for step, event, at in noted if event != "step"}
    return [ended[step] - began[step] for step in sorted(ended)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", default=".")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    trees = args.trees.split(",")
    results: dict[str, list[list[float]]] = {tree: [] for tree in trees}
    for _ in range(args.rounds):
        for tree in trees:
            results[tree].append(times(tree))
    for tree, rounds in results.items():
        first = statistics.median(each[0] for each in rounds)
        later = statistics.median(second for each in rounds for second in each[2:])
        print(f"{tree}: first {first:.2f} s, later {later:.3f} s (medians of {args.rounds} rounds)")


if __name__ == "__main__":
    main()
