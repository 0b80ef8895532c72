"""SeqIO tasks of what is classified: "classify_glue_cola" and so on, and those of CLASSIFICATIONS.

An example has `inputs` [K, T], token ids with padding on the right, `lengths` [K] and `label` [classes], the probabilities
of the classes; 0 of a test split's record whose label is not known.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.texts import VOCABULARY
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.prompts.catalogue import WITHOUT_TEMPLATES, DataSet, find
from t5x_lab.prompts.classification import Classification
from t5x_lab.prompts.config import Prompts, Records
from t5x_lab.prompts.places import RecordsOfDataSet
from t5x_lab.prompts.records import OnlySplits, as_json, fields_of
from t5x_lab.prompts.registry import register
from t5x_lab.prompts.sequences import Sequences


class ClassifiedTask(seqio.Task):
    """A SeqIO task that knows what it classifies.

    Attributes:
      classification: that.
    """

    def __init__(self, *args, classification: Classification, **options):
        super().__init__(*args, **options)
        self.classification, self.data_set, self.prompt = classification, classification.data_set, ""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Of start, delimiter and extract token, beside those of the vocabulary."""
        return token_ids(self.classification, self.output_features["inputs"].vocabulary)


def token_ids(classification: Classification, vocabulary: seqio.Vocabulary) -> tuple[int, ...]:
    """Of start, delimiter and extract token."""
    size = vocabulary.vocab_size
    return classification.tokens or (size, size + 1, size + 2)


def records_of(classification: Classification, prompts: Prompts) -> RecordsOfDataSet:
    """Where the data set's records lie."""
    name = classification.data_set
    return RecordsOfDataSet(find(name) or WITHOUT_TEMPLATES.get(name) or DataSet(name), prompts)


def training_records(classification: Classification, prompts: Prompts) -> int | None:
    """How many there are: as said, counted, or as the catalogue has it.

    Raises:
      UserError: when there is no training split.
    """
    records = records_of(classification, prompts)
    source, said = records.source(), records.said
    if "train" not in source.splits:
        raise UserError(
            f'The data set "{classification.data_set}" has no training split where its records are said to lie; it has '
            f"{', '.join(sorted(source.splits, reverse=True))}. Say which records are trained on: Records.splits = "
            '{"train": "validation", "validation": "test"}, for example.'
        )
    if isinstance(said, Records) and said.num_examples:
        return said.num_examples
    if isinstance(said, Records) and said.each:
        lines = as_json(source.get_dataset("train", shuffle=False), said)
        return int(lines.reduce(np.int64(0), lambda count, line: count + 1))
    return source.num_input_examples("train") or records.num_examples


def check_head(task: seqio.Task, head: ClassificationHead | None) -> None:
    """Raises a `UserError` where a task's classes are not those of a model's head."""
    of = getattr(task, "classification", None)
    if of is None or head is None:
        return
    if (of.classes, of.combine) != (head.classes, head.combine):
        raise UserError(
            f'The task "{task.name}" has the classes {", ".join(of.classes)} ({of.combine}), and the head of the model '
            f"{', '.join(head.classes)} ({head.combine}). Take a task of the head's own classes, or a "
            "head for this task's: head_of_task.task."
        )


def declare(name: str, prompts: Prompts) -> bool:
    """Makes the task of this name known to SeqIO; False where it is none of these."""
    classification = prompts.classification(name)
    if classification is None:
        return False
    records = records_of(classification, prompts)
    source = records.source()
    read = functools.partial(_examples, classification=classification, records=records.fields, clean=prompts.clean)
    numbers = functools.partial(seqio.Feature, seqio.PassThroughVocabulary(size=0), add_eos=False)
    register(
        ClassifiedTask(
            name,
            OnlySplits(source, source.splits, classification.data_set),
            classification=classification,
            preprocessors=[read],
            output_features={
                "inputs": seqio.Feature(VOCABULARY, add_eos=False, rank=2),
                "lengths": numbers(dtype=tf.int32),
                "label": numbers(dtype=tf.float32),
            },
        )
    )
    return True


def _examples(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, seqio.Feature],
    classification: Classification,
    records: Records,
    clean: Any,
) -> tf.data.Dataset:
    (split,) = dataset.element_spec
    vocabulary, length = output_features["inputs"].vocabulary, (sequence_length or {}).get("inputs")
    if length is None:
        raise UserError(f'The data set "{classification.data_set}" needs a length for "inputs" in TASK_FEATURE_LENGTHS.')

    @functools.cache  # the vocabulary's file is opened when something is read
    def made() -> Sequences:
        tokens = token_ids(classification, vocabulary)
        return Sequences(vocabulary.encode, tokens, length, classification.symmetric, clean)

    def of(line: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        try:
            label, sequences = _read(line, split, classification, records, made())
        except UserError as error:
            start = line.decode("utf-8", "replace")[:200]
            sentence = f"{error.sentence.rstrip('.')}. The record of {classification.data_set}: {start}"
            raise UserError(sentence) from error
        lengths = np.array([len(ids) for ids in sequences], np.int32)
        inputs = np.zeros((len(sequences), int(lengths.max(initial=0))), np.int32)
        for row, ids in zip(inputs, sequences, strict=True):
            row[: len(ids)] = ids
        return inputs, lengths, np.array(label or [], np.float32), label is not None

    @tf.autograph.experimental.do_not_convert
    def example(record: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        types = [tf.int32, tf.int32, tf.float32, tf.bool]
        inputs, lengths, label, is_kept = tf.numpy_function(of, [record["record"]], types, stateful=False)
        shaped = {
            "inputs": (inputs, [None, None]),
            "lengths": (lengths, [None]),
            "label": (label, [None]),
            "kept": (is_kept, []),
        }
        return {name: tf.ensure_shape(x, shape) for name, (x, shape) in shaped.items()}

    lines = as_json(dataset.map(lambda record: record[split]), records)
    kept = lines.map(example).filter(lambda example: example["kept"])
    return kept.map(lambda example: {name: x for name, x in example.items() if name != "kept"})


def _read(
    line: bytes, split: str, classification: Classification, records: Records, sequences: Sequences
) -> tuple[list[float] | None, list[list[int]]]:
    """(probabilities, sequences) of a record; (None, none) of one that is left out."""
    # Labels are read here: the catalogue's numbers of names may be others than those of the classes.
    names = records.labels.get(classification.label, ())
    others = {name: labels for name, labels in records.labels.items() if name != classification.label}
    fields = fields_of(line, dataclasses.replace(records, labels=others))
    value = fields.get(classification.label)
    if value in names and value not in (*classification.classes, *classification.labels, *classification.left_out):
        fields[classification.label] = names.index(value)
    if split == "test" and value in (None, "", -1):
        label: list[float] | None = [0.0] * len(classification.classes)
    else:
        label = classification.probabilities(fields)
    return (None, []) if label is None else (label, sequences(classification.texts(fields)))


def rows_of(ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int], head: Any) -> tf.data.Dataset:
    """Rows of a classifier's batches, see `SequencesConverter`."""
    spec = ds.element_spec
    if not {"inputs", "lengths", "label"} <= set(spec) or "inputs" not in task_feature_lengths:
        raise UserError(
            f"A classifier reads inputs [K, T], lengths [K] and label [classes]; examples have {', '.join(spec)}, and "
            f"TASK_FEATURE_LENGTHS {', '.join(task_feature_lengths)}. Name a task such as classify_glue_cola."
        )
    sequences, classes, length = head.sequences, len(head.classes), task_feature_lengths["inputs"]

    @tf.autograph.experimental.do_not_convert
    def row(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        fits = [
            tf.debugging.assert_equal(tf.size(example[name]), number, f"{what} of the head and of an example differ")
            for name, number, what in (("lengths", sequences, "The sequences"), ("label", classes, "The classes"))
        ]
        with tf.control_dependencies(fits):
            inputs = tf.pad(example["inputs"], [[0, 0], [0, length - tf.shape(example["inputs"])[1]]])
        others: dict[str, Any] = {name: example[name] for name in ("raw_tokens", "task") if name in example}
        return {
            "sequences": tf.ensure_shape(inputs, [sequences, length]),
            "sequence_lengths": tf.ensure_shape(example["lengths"], [sequences]),
            "class_probabilities": tf.ensure_shape(example["label"], [classes]),
            **others,
        }

    return ds.map(row)
