"""Conversion of records to tensors with the types of TensorFlow Datasets, which the `t5` library's preprocessors read."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.records.json_records import json_records, record_fields

_UNUSED_TEXTS = ("id", "title", "publisher")  # no task of the suite reads them, and files often lack them


def to_typed_tensors(dataset: tf.data.Dataset, records: Records, features: Any, name: str) -> tf.data.Dataset:
    """SeqIO preprocessor that converts a source's elements to tensors of these features.

    Missing numbers become -1 and missing lists become empty. Labels may be missing in the split "test" only.

    Args:
      dataset: elements {split: record} of `OnlySplits`. Records are JSON or structures of tensors.
      records: names of the fields.
      features: `tfds.features.FeaturesDict`.
      name: name of the data set, for messages.
    """
    (split,) = dataset.element_spec
    dataset = dataset.map(lambda example: example[split])
    spec = features.get_tensor_spec()
    labels = {key: tuple(getattr(feature, "names", None) or ()) for key, feature in features.items()}
    fields = _TypedFields(spec, labels, split != "test")
    convert = functools.partial(_convert_record, records=records, fields=fields, name=name)

    @tf.autograph.experimental.do_not_convert
    def to_tensors(example: dict[str, tf.Tensor]) -> dict[str, Any]:
        flat = tf.nest.flatten(spec)
        values = tf.numpy_function(convert, [example["record"]], [leaf.dtype for leaf in flat], stateful=False)
        shaped = [tf.ensure_shape(x, leaf.shape) for x, leaf in zip(values, flat, strict=True)]
        return tf.nest.pack_sequence_as(spec, shaped)

    return json_records(dataset, records).map(to_tensors)


def _convert_record(line: bytes, records: Records, fields: "_TypedFields", name: str) -> list:
    try:
        return tf.nest.flatten(fields(record_fields(line, records)))
    except UserError as error:
        excerpt = line.decode("utf-8", "replace")[:200]
        raise UserError(f"{error.sentence.rstrip('.')}. The record of {name}: {excerpt}") from error


@dataclasses.dataclass(frozen=True)
class _TypedFields:
    """Converts the fields of a record to their types.

    Attributes:
      spec: tensor specs by field.
      labels: class names by label field.
      has_labels: whether records must have labels.
    """

    spec: Mapping[str, Any]
    labels: Mapping[str, tuple[str, ...]]
    has_labels: bool

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._convert(key, spec, fields) for key, spec in self.spec.items()}

    def _convert(self, key: str, spec: Any, fields: Mapping[str, Any]) -> Any:
        value = fields.get(key)
        if isinstance(spec, Mapping):
            if not isinstance(value, Mapping):
                raise UserError(f'the field "{key}" is {_describe(value)}; it must have {", ".join(spec)}')
            return _TypedFields(spec, {}, self.has_labels)(value)
        if spec.shape.rank:
            value = [] if value is None else value
            if not isinstance(value, list | tuple):
                raise UserError(f'the field "{key}" is {_describe(value)}; it must be a list')
            return np.array([_encode(x) if spec.dtype == tf.string else x for x in value], _numpy_type(spec.dtype))
        if spec.dtype == tf.string:
            if value is None and key not in _UNUSED_TEXTS:
                raise _missing_field(key, fields)
            return _encode("" if value is None else value)
        names = self.labels.get(key, ())
        if value is None or value == "":
            if self.has_labels and (names or key == "label"):
                raise _missing_field(key, fields)
            return _numpy_type(spec.dtype)(-1)
        number = _parse_number(key, value, names)
        is_whole = math.isfinite(number) and number == int(number)
        if not (spec.dtype.is_floating or is_whole) or not spec.dtype.min <= number <= spec.dtype.max:
            noun = "number" if spec.dtype.is_floating else "whole number"
            raise UserError(f'the field "{key}" is {value!r}; it must be a {noun} of type {spec.dtype.name}')
        if names and not -1 <= number < len(names):
            raise UserError(f"the {key} is {value!r}; it must be 0 to {len(names) - 1}, or one of {', '.join(names)}")
        if self.has_labels and number == -1 and (names or key == "label"):
            raise UserError(f"the {key} is -1, a hidden label; train and evaluate on other splits")
        return _numpy_type(spec.dtype)(number)


def _missing_field(key: str, fields: Mapping[str, Any]) -> UserError:
    return UserError(f'it has no field "{key}"; it has {", ".join(fields) or "none"}')


def _encode(text: Any) -> bytes:
    return str(text).encode()


def _numpy_type(dtype: tf.DType) -> Any:
    return object if dtype == tf.string else dtype.as_numpy_dtype


def _parse_number(key: str, value: Any, names: tuple[str, ...]) -> float:
    """Returns a number, or the number of a label's name."""
    if str(value) in names:
        return names.index(str(value))
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            alternative = f" nor one of {', '.join(names)}" if names else ""
            raise UserError(f'the {key} "{value}" is not a number{alternative}') from None
    if not isinstance(value, int | float):
        raise UserError(f'the field "{key}" is {_describe(value)}; it must be a number')
    return value


def _describe(value: Any) -> str:
    return "missing" if value is None else f"{value!r}"
