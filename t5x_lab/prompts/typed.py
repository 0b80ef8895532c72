"""Records as tensors with the types that TensorFlow Datasets gives their fields, which the `t5` library's steps read."""

import functools
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

    Numbers that a record lacks are -1, as labels of test splits are, and lists are empty.

    Args:
      dataset: of JSON, or of structures of tensors.
      records: what the fields are called there.
      features: `tfds.features.FeaturesDict`.
      name: of the data set, for messages.
    """
    spec = features.get_tensor_spec()
    convert = functools.partial(_tensors, records=records, spec=spec, features=features, name=name)

    @tf.autograph.experimental.do_not_convert
    def made(example: dict[str, tf.Tensor]) -> dict[str, Any]:
        flat = tf.nest.flatten(spec)
        found = tf.numpy_function(convert, [example["record"]], [each.dtype for each in flat], stateful=False)
        shaped = [tf.ensure_shape(x, each.shape) for x, each in zip(found, flat, strict=True)]
        return tf.nest.pack_sequence_as(spec, shaped)

    return as_json(dataset, records).map(made)


def _tensors(line: bytes, records: Records, spec: Mapping[str, Any], features: Any, name: str) -> list:
    try:
        return tf.nest.flatten(_as_said(fields_of(line, records), spec, features))
    except UserError as error:
        start = line.decode("utf-8", "replace")[:200]
        raise UserError(f"{error.sentence.rstrip('.')}. The record of {name}: {start}") from error


def _as_said(fields: Mapping[str, Any], spec: Mapping[str, Any], features: Any) -> dict:
    found: dict[str, Any] = {}
    for key, like in spec.items():
        value = fields.get(key)
        if isinstance(like, Mapping):
            if not isinstance(value, Mapping):
                raise UserError(f'the field "{key}" is {_shown(value)}; it has {", ".join(like)}')
            found[key] = _as_said(value, like, None)
        elif like.shape.rank:
            value = [] if value is None else value
            if not isinstance(value, list | tuple):
                raise UserError(f'the field "{key}" is {_shown(value)}; it is a list')
            found[key] = np.array([_encoded(x) if like.dtype == tf.string else x for x in value], _numpy(like.dtype))
        elif like.dtype == tf.string:
            if value is None and key not in _TEXTS_NOT_READ:
                raise UserError(f'it has no field "{key}"; it has {", ".join(fields) or "none"}')
            found[key] = _encoded("" if value is None else value)
        else:
            found[key] = _numpy(like.dtype)(_number(key, value, features))
    return found


def _encoded(text: Any) -> bytes:
    return str(text).encode()


def _numpy(dtype: tf.DType) -> Any:
    return object if dtype == tf.string else dtype.as_numpy_dtype


def _number(key: str, value: Any, features: Any) -> float:
    """A number, the one that a label's name stands for, or -1."""
    if value is None or value == "":
        return -1
    labels = getattr(features[key], "names", None) if features is not None else None
    if labels and str(value) in labels:
        return labels.index(str(value))
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            known = f" nor one of {', '.join(labels)}" if labels else ""
            raise UserError(f'the {key} "{value}" is no number{known}') from None
    if not isinstance(value, int | float):
        raise UserError(f'the field "{key}" is {_shown(value)}; it is a number')
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{value!r}"
