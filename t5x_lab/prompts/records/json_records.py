"""Records as JSON text: encoding of what sources give, and decoding into fields for templates."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.user_code import call_user_code
from t5x_lab.data.sources.resumable import READ_BATCH
from t5x_lab.prompts.config import Records


def json_records(dataset: tf.data.Dataset, records: Records | None = None) -> tf.data.Dataset:
    """Returns a dataset of {"record": JSON text} from a source's elements.

    Args:
      dataset: JSON texts, or structures of tensors (TensorFlow Datasets).
      records: settings of the records. `each` is applied.
    """
    lines = _encode_elements(dataset)
    if records is None or records.each is None:
        return lines
    expand = functools.partial(_expand_records, each=records.each)

    @tf.autograph.experimental.do_not_convert
    def expand_batch(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        expanded = tf.numpy_function(expand, [example["record"]], tf.string, stateful=False)
        return {"record": tf.ensure_shape(expanded, [None])}

    return lines.batch(READ_BATCH).map(expand_batch).unbatch()


def _expand_records(lines: np.ndarray, each: Callable[[dict], Sequence[dict]]) -> np.ndarray:
    expanded = []
    for line in lines:
        records = call_user_code("Records.each fails", lambda line=line: [*(each(parse_json(line)) or [])])
        expanded += [encode_json(record) for record in records]
    return np.array(expanded, object)


def _encode_elements(records: tf.data.Dataset) -> tf.data.Dataset:
    spec = records.element_spec
    if isinstance(spec, tf.TensorSpec):
        return records.map(lambda record: {"record": record})

    @tf.autograph.experimental.do_not_convert
    def encode(example: Any) -> dict[str, tf.Tensor]:
        flat = tf.nest.flatten(example, expand_composites=True)
        pack = lambda *values: encode_json(tf.nest.pack_sequence_as(spec, values, expand_composites=True))
        return {"record": tf.ensure_shape(tf.numpy_function(pack, flat, tf.string, stateful=False), [])}

    return records.map(encode)


def encode_json(record: Any) -> bytes:
    """Returns a record as JSON text in UTF-8."""
    return json.dumps(_to_json_types(record), ensure_ascii=False, default=str).encode()


def _to_json_types(value: Any) -> Any:
    """Converts arrays, tensors and bytes to JSON's types."""
    if isinstance(value, Mapping):
        return {str(name): _to_json_types(entry) for name, entry in value.items()}
    if isinstance(value, tf.RaggedTensor):
        return _to_json_types(value.to_list())
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        return _to_json_types(np.asarray(value).tolist())
    if isinstance(value, list | tuple):
        return [_to_json_types(entry) for entry in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def record_fields(line: bytes, records: Records) -> dict[str, Any]:
    """Returns the fields of a record under the names that templates use, with labels as numbers.

    Raises:
      UserError: if the line is not a JSON object, or a label is not in `Records.labels`.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(f"the record is not JSON: {line[:80]!r}") from error
    if not isinstance(record, dict):
        raise UserError(f"the record is not a JSON object: {line[:80]!r}")
    renamed = {name: _nested_field(record, path) for name, path in records.names.items()}
    record = {name: value for name, value in record.items() if name not in records.names.values()}
    record |= {name: value for name, value in renamed.items() if value is not None}
    for name, labels in records.labels.items():
        value = record.get(name)
        if isinstance(value, str | bool):
            if str(value) not in labels:
                raise UserError(f'the {name} is "{value}"; it must be one of {", ".join(labels)}')
            record[name] = labels.index(str(value))
    return record


def _nested_field(record: Mapping[str, Any], path: str) -> Any:
    """Returns the field at a path, in which dots select fields of nested objects, None if it is missing."""
    value: Any = record
    for key in [path] if path in record else path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
