"""Records as tensors with the types that TensorFlow Datasets gives their fields, which the `t5` library's steps read."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.records import as_json, fields_of

_TEXTS_NOT_READ = ("id", "title", "publisher")  # by any step of the suite; files often lack them


def typed(dataset: tf.data.Dataset, records: Records, features: Any, name: str) -> tf.data.Dataset:
    """A step of a SeqIO task: what a source gives, as tensors of these features.

    Numbers that a record lacks are -1, and lists are empty; only in the split "test" may labels be lacking.

    Args:
      dataset: of {split: record}, as `OnlySplits` has it; records are JSON, or structures of tensors.
      records: what the fields are called there.
      features: `tfds.features.FeaturesDict`.
      name: of the data set, for messages.
    """
    (split,) = dataset.element_spec
    dataset = dataset.map(lambda example: example[split])
    spec = features.get_tensor_spec()
    labels = {key: tuple(getattr(feature, "names", None) or ()) for key, feature in features.items()}
    read = _Fields(spec, labels, split != "test")
    convert = functools.partial(_tensors, records=records, read=read, name=name)

    @tf.autograph.experimental.do_not_convert
    def made(example: dict[str, tf.Tensor]) -> dict[str, Any]:
        flat = tf.nest.flatten(spec)
        found = tf.numpy_function(convert, [example["record"]], [each.dtype for each in flat], stateful=False)
        shaped = [tf.ensure_shape(x, each.shape) for x, each in zip(found, flat, strict=True)]
        return tf.nest.pack_sequence_as(spec, shaped)

    return as_json(dataset, records).map(made)


def _tensors(line: bytes, records: Records, read: "_Fields", name: str) -> list:
    try:
        return tf.nest.flatten(read(fields_of(line, records)))
    except UserError as error:
        start = line.decode("utf-8", "replace")[:200]
        raise UserError(f"{error.sentence.rstrip('.')}. The record of {name}: {start}") from error


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Fields of a record as their types have them.

    Attributes:
      spec: of tensors, by name.
      labels: names of classes, by the name of the field that is one of them.
      has_labels: whether records must have them.
    """

    spec: Mapping[str, Any]
    labels: Mapping[str, tuple[str, ...]]
    has_labels: bool

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._value(key, like, fields) for key, like in self.spec.items()}

    def _value(self, key: str, like: Any, fields: Mapping[str, Any]) -> Any:
        value = fields.get(key)
        if isinstance(like, Mapping):
            if not isinstance(value, Mapping):
                raise UserError(f'the field "{key}" is {_shown(value)}; it has {", ".join(like)}')
            return _Fields(like, {}, self.has_labels)(value)
        if like.shape.rank:
            value = [] if value is None else value
            if not isinstance(value, list | tuple):
                raise UserError(f'the field "{key}" is {_shown(value)}; it is a list')
            return np.array([_encoded(x) if like.dtype == tf.string else x for x in value], _numpy(like.dtype))
        if like.dtype == tf.string:
            if value is None and key not in _TEXTS_NOT_READ:
                raise _missing(key, fields)
            return _encoded("" if value is None else value)
        names = self.labels.get(key, ())
        if value is None or value == "":
            if self.has_labels and (names or key == "label"):
                raise _missing(key, fields)
            return _numpy(like.dtype)(-1)
        number = _number(key, value, names)
        is_whole = math.isfinite(number) and number == int(number)
        if not (like.dtype.is_floating or is_whole) or not like.dtype.min <= number <= like.dtype.max:
            what = "number" if like.dtype.is_floating else "whole number"
            raise UserError(f'the field "{key}" is {value!r}; it is a {what} of {like.dtype.name}')
        if names and not -1 <= number < len(names):
            raise UserError(f"the {key} is {value!r}; it is 0 to {len(names) - 1}, or one of {', '.join(names)}")
        if self.has_labels and number == -1 and (names or key == "label"):
            raise UserError(f"the {key} is -1, as of records whose labels are kept secret; train and evaluate on others")
        return _numpy(like.dtype)(number)


def _missing(key: str, fields: Mapping[str, Any]) -> UserError:
    return UserError(f'it has no field "{key}"; it has {", ".join(fields) or "none"}')


def _encoded(text: Any) -> bytes:
    return str(text).encode()


def _numpy(dtype: tf.DType) -> Any:
    return object if dtype == tf.string else dtype.as_numpy_dtype


def _number(key: str, value: Any, names: tuple[str, ...]) -> float:
    """A number, or the one that a label's name stands for."""
    if str(value) in names:
        return names.index(str(value))
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            known = f" nor one of {', '.join(names)}" if names else ""
            raise UserError(f'the {key} "{value}" is no number{known}') from None
    if not isinstance(value, int | float):
        raise UserError(f'the field "{key}" is {_shown(value)}; it is a number')
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{value!r}"
