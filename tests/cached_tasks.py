"""Tasks over sources of several kinds, their caches, and the batches that are read from them."""

import functools
import json

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from t5x_lab.data.cache import writing as caching
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.pipeline.evaluation_batches import EvalBatches
from t5x_lab.data.sources import text_files as sources
from t5x_lab.data.vocabularies.config import ByteVocabulary

BYTES = ByteVocabulary()


def task_of(name, source, steps=(), make=seqio.Task):
    return make(
        name,
        source,
        preprocessors=[
            lambda data: data.map(lambda line: {name: line["text"] if isinstance(line, dict) else line for name in BOTH}),
            seqio.preprocessors.tokenize,
            *steps,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos,
        ],
        output_features={name: seqio.Feature(seqio.ByteVocabulary(100)) for name in BOTH},
    )


BOTH = ("inputs", "targets")


def lines_of(folder, name, sizes):
    """Texts of so many lines each."""
    files = [folder / f"{name}{number}.txt" for number in range(len(sizes))]
    for number, (file, lines) in enumerate(zip(files, sizes, strict=True)):
        file.write_text("".join(f"{name} {number} {line}\n" for line in range(lines)))
    return [str(file) for file in files]


def of_lines(folder, name, sizes):
    files = lines_of(folder, name, sizes)
    return seqio.TextLineDataSource({"train": files, "validation": files[:1]})


def of_documents(folder, name, sizes):
    files = lines_of(folder, name, sizes)
    return sources.document_files({"train": files, "validation": files[:1]}, lines_per_document=1)


def of_tfds(folder, name, sizes, split="train"):
    """A data set of TFDS's, prepared in files of so many examples."""
    features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
    data_dir, folder = folder, folder / name / "1.0.0"
    folder.mkdir(parents=True)
    template = tfds.core.ShardedFileTemplate(data_dir=str(folder), dataset_name=name, split="train", filetype_suffix="tfrecord")
    for number, (file, count) in enumerate(zip(template.sharded_filepaths(len(sizes)), sizes, strict=True)):
        with tf.io.TFRecordWriter(str(file)) as writer:
            for line in range(count):
                writer.write(seqio.dict_to_tfexample({"text": f"{name} {number} {line}"}).SerializeToString())
    infos = [tfds.core.SplitInfo(name="train", shard_lengths=list(sizes), num_bytes=1, filename_template=template)]
    tfds.folder_dataset.write_metadata(
        data_dir=str(folder), features=features, split_infos=infos, filename_template=None, check_data=False
    )
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**info, "name": name, "version": "1.0.0"}))
    splits = {"train": split, "validation": f"train[:{sizes[0]}]"}
    return seqio.TfdsDataSource(f"{name}:1.0.0", str(data_dir), splits=splits)


def of_function(folder, name, sizes):
    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.range(sum(sizes)).map(lambda i: tf.strings.join([name, tf.strings.as_string(i)]))

    return seqio.FunctionDataSource(read, splits=["train", "validation"])


KINDS = {
    "lines": of_lines,
    "documents": of_documents,
    "tfds": of_tfds,
    "tfds of two ranges": functools.partial(of_tfds, split="train[:30%]+train[45%:81%]"),
    "function": of_function,
}


def cached(task, folder, vocabulary=BYTES):
    for pieces in caching.begin(task, str(folder), vocabulary).values():
        for piece in pieces:
            caching.write(piece, task, str(folder))
    return caching.complete(task, str(folder), vocabulary)


def batches(name, number=3, **options):
    config = DataConfig(name, {"inputs": 16, "targets": 16}, 16, BYTES, **options)
    tasks = resolve_tasks(config, "encoder_decoder", 384)
    read = SeqioBatches(tasks, config, seed=3)
    trained = [next(read) for _ in range(number)]
    return [*trained, *(batch for part in tasks.components for batch in EvalBatches(tasks, part, config, num_batches=3))]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
