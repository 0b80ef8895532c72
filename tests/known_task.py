"""A task that a small model learns by heart, in words of bytes, with metrics of every kind; written into a test's folder."""

import pathlib

WORDS = {
    "red": "color", "blue": "color", "pink": "color", "two": "number", "nine": "number", "six": "number",
    "cat": "animal", "fox": "animal", "owl": "animal", "oak": "tree", "elm": "tree", "fir": "tree",
}  # fmt: skip
CHOICES = ["animal", "color", "number", "tree"]
QUESTIONS = [f"what is {word}?" for word in WORDS]
ANSWERS = list(WORDS.values())

TASKS = """
import functools

import seqio
import tensorflow as tf
from t5.data import postprocessors as t5_postprocessors, preprocessors as t5_steps
from t5.evaluation import metrics as t5_metrics

@seqio.map_over_dataset
def parse(line):
    parts = tf.strings.split(line, "\\t")
    return {"inputs": parts[0], "targets": parts[1]}

def exact(targets, predictions):
    return {"exact": sum(a == b for a, b in zip(targets, predictions)) / len(targets)}

def mean_score(targets, scores):
    return {"mean_score": float(sum(scores) / len(scores))}

class Longest(seqio.metrics.CollectingMetric):
    model_output_type = seqio.metrics.ModelOutputType.PREDICTION

    def actual_compute(self, task_dataset_as_numpy, task_output_features, target_field_name="targets", cached_targets=None, **unused):
        values = super().compute()["model_output"]
        return {"longest": int((values > 2).sum(axis=1).max())}, {"targets": None}

vocabulary = seqio.ByteVocabulary(100)
steps = [parse, seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos]
files = {"train": "known.tsv", "validation": "known.tsv"}
for name, metrics in {"known": [exact, mean_score], "known_too": [exact]}.items():
    seqio.TaskRegistry.add(
        name, seqio.TextLineDataSource(files), preprocessors=steps, metric_fns=metrics,
        output_features={k: seqio.Feature(vocabulary) for k in ("inputs", "targets")},
    )

@seqio.map_over_dataset
def numbered(example):
    label = tf.argmax(tf.equal(KINDS, example["targets"]), output_type=tf.int32)
    return {"inputs": example["inputs"], "label": label}

KINDS = ["animal", "color", "number", "tree"]
rank = functools.partial(t5_steps.rank_classification_formatter, inputs_formats="{inputs}", targets_formats=KINDS)
seqio.TaskRegistry.add(
    "ranked", seqio.TextLineDataSource(files), preprocessors=[parse, numbered, rank, *steps[1:]],
    postprocess_fn=t5_postprocessors.rank_classification,
    metric_fns=[functools.partial(t5_metrics.rank_classification, num_classes=4)],
    output_features={k: seqio.Feature(vocabulary) for k in ("inputs", "targets")},
)
seqio.MixtureRegistry.add("both_known", [("known", 1.0), ("known_too", 1.0)])
"""

TRAIN = [
        "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_bindings=import known_tasks",
        "--gin.MIXTURE_OR_TASK_NAME=known", '--gin.TASK_FEATURE_LENGTHS={"inputs": 20, "targets": 8}',
        "--gin.VOCABULARY=@ByteVocabulary()", "--gin.TransformerConfig.vocab_size=384", "--gin.TransformerConfig.emb_dim=64",
        '--gin.TransformerConfig.dtype="float32"', "--gin.BATCH_SIZE=8", "--gin.DATA_SHARDS=1", "--gin.DataConfig.pack=False",
]  # fmt: skip


def write_task(folder: pathlib.Path, more: str = "") -> None:
    """Writes known_tasks.py, with `more` at its end, and the file that it reads."""
    (folder / "known.tsv").write_text("".join(f"{q}\t{a}\n" for q, a in zip(QUESTIONS, ANSWERS, strict=True)))
    (folder / "known_tasks.py").write_text(TASKS + more)
