"""SeqIO tasks for a classification head: "classify_glue_cola" and so on, and those of CLASSIFICATIONS.

An example has `inputs` [K, T], token ids padded on the right, `lengths` [K], and `label` [classes], the probabilities of the
classes. The label of a test record with a hidden label is 0.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.tasks.text_tasks import BYTE_VOCABULARY
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.prompts.classification.config import Classification
from t5x_lab.prompts.classification.sequences import Sequences
from t5x_lab.prompts.config import PromptConfig, Records
from t5x_lab.prompts.data_sets import DataSet, find_data_set
from t5x_lab.prompts.records.json_records import json_records, record_fields
from t5x_lab.prompts.records.locations import RecordLocation
from t5x_lab.prompts.records.subsets import OnlySplits
from t5x_lab.prompts.tasks.registry import register


class ClassificationTask(seqio.Task):
    """SeqIO task for a classification head.

    Attributes:
      classification: settings of the task.
    """

    def __init__(self, *args, classification: Classification, **options):
        super().__init__(*args, **options)
        self.classification, self.data_set, self.prompt = classification, classification.data_set, ""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the start, delimiter and extract token."""
        return special_token_ids(self.classification, self.output_features["inputs"].vocabulary)


def special_token_ids(classification: Classification, vocabulary: seqio.Vocabulary) -> tuple[int, ...]:
    """Returns the ids of the start, delimiter and extract token."""
    size = vocabulary.vocab_size
    return classification.tokens or (size, size + 1, size + 2)


def record_location(classification: Classification, prompts: PromptConfig) -> RecordLocation:
    """Returns the location of the data set's records."""
    name = classification.data_set
    return RecordLocation(find_data_set(name) or DataSet(name), prompts)


def count_training_records(classification: Classification, prompts: PromptConfig) -> int | None:
    """Returns the number of training records: as set, counted, or built in. None = unknown.

    Raises:
      UserError: if there is no training split.
    """
    location = record_location(classification, prompts)
    source, records = location.source(), location.configured
    if "train" not in source.splits:
        raise UserError(
            f'The records of the data set "{classification.data_set}" have no training split. They have '
            f"{', '.join(sorted(source.splits, reverse=True))}. Choose the training records: Records.splits = "
            '{"train": "validation", "validation": "test"}, for example.'
        )
    if isinstance(records, Records) and records.num_examples:
        return records.num_examples
    if isinstance(records, Records) and records.each:
        lines = json_records(source.get_dataset("train", shuffle=False), records)
        return int(lines.reduce(np.int64(0), lambda count, line: count + 1))
    return source.num_input_examples("train") or location.num_examples


def check_head(task: seqio.Task, head: ClassificationHead | None) -> None:
    """Raises a `UserError` if a task's classes are not those of the model's head."""
    classification = getattr(task, "classification", None)
    if classification is None or head is None:
        return
    if (classification.classes, classification.combine) != (head.classes, head.combine):
        raise UserError(
            f'The task "{task.name}" has the classes {", ".join(classification.classes)} ({classification.combine}), but the '
            f"model's head has {', '.join(head.classes)} ({head.combine}). Use a task with the head's classes, or a head for "
            "this task: task_head.task."
        )


def register_classification_task(name: str, classification: Classification, prompts: PromptConfig) -> None:
    """Registers a classification task with SeqIO."""
    location = record_location(classification, prompts)
    source = location.source()
    encode = functools.partial(_encode_examples, classification=classification, records=location.fields, clean=prompts.clean)
    number_feature = functools.partial(seqio.Feature, seqio.PassThroughVocabulary(size=0), add_eos=False)
    register(
        ClassificationTask(
            name,
            OnlySplits(source, source.splits, classification.data_set),
            classification=classification,
            preprocessors=[encode],
            output_features={
                "inputs": seqio.Feature(BYTE_VOCABULARY, add_eos=False, rank=2),
                "lengths": number_feature(dtype=tf.int32),
                "label": number_feature(dtype=tf.float32),
            },
        )
    )


def _encode_examples(
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

    @functools.cache  # the vocabulary file is opened when the first record is read
    def encoder() -> Sequences:
        tokens = special_token_ids(classification, vocabulary)
        return Sequences(vocabulary.encode, tokens, length, classification.symmetric, clean)

    def encode(line: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        try:
            label, sequences = _encode_record(line, split, classification, records, encoder())
        except UserError as error:
            excerpt = line.decode("utf-8", "replace")[:200]
            sentence = f"{error.sentence.rstrip('.')}. The record of {classification.data_set}: {excerpt}"
            raise UserError(sentence) from error
        lengths = np.array([len(ids) for ids in sequences], np.int32)
        inputs = np.zeros((len(sequences), int(lengths.max(initial=0))), np.int32)
        for row, ids in zip(inputs, sequences, strict=True):
            row[: len(ids)] = ids
        return inputs, lengths, np.array(label or [], np.float32), label is not None

    @tf.autograph.experimental.do_not_convert
    def to_example(record: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        types = [tf.int32, tf.int32, tf.float32, tf.bool]
        inputs, lengths, label, keep = tf.numpy_function(encode, [record["record"]], types, stateful=False)
        shaped = {
            "inputs": (inputs, [None, None]),
            "lengths": (lengths, [None]),
            "label": (label, [None]),
            "keep": (keep, []),
        }
        return {name: tf.ensure_shape(x, shape) for name, (x, shape) in shaped.items()}

    lines = json_records(dataset.map(lambda record: record[split]), records)
    examples = lines.map(to_example).filter(lambda example: example["keep"])
    return examples.map(lambda example: {name: x for name, x in example.items() if name != "keep"})


def _encode_record(
    line: bytes, split: str, classification: Classification, records: Records, encoder: Sequences
) -> tuple[list[float] | None, list[list[int]]]:
    """Returns (class probabilities, sequences) of a record, (None, []) if it is dropped."""
    # The label is read here: the data set's label numbers may differ from those of the classes.
    names = records.labels.get(classification.label, ())
    other_labels = {name: labels for name, labels in records.labels.items() if name != classification.label}
    fields = record_fields(line, dataclasses.replace(records, labels=other_labels))
    value = fields.get(classification.label)
    if value in names and value not in (*classification.classes, *classification.labels, *classification.left_out):
        fields[classification.label] = names.index(value)
    if split == "test" and value in (None, "", -1):
        label: list[float] | None = [0.0] * len(classification.classes)
    else:
        label = classification.probabilities(fields)
    return (None, []) if label is None else (label, encoder(classification.texts(fields)))
