"""Examples for inference from files of texts and records."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.data.sources.file_types import FileType, file_type, read_lines
from t5x_lab.data.sources.tables import read_rows
from t5x_lab.evaluation.examples import Example
from t5x_lab.evaluation.questions import Question

# Fields that a line must have, by the mode of `t5x_lab infer`.
MODES = {"predict": ("inputs",), "score": ("inputs", "targets"), "rank": ("inputs",), "classify": ("inputs",)}


def read_examples(
    path: str, mode: str, choices: Sequence[str] = (), shard_id: int = 0, num_shards: int = 1
) -> Iterator[Example]:
    """Reads examples from a .txt file (one input per line), or from records: .jsonl, .csv, .tsv, .parquet or .tfrecord.

    Files may be compressed (.gz, .zst). Records have "inputs". To score they also have "targets". To rank see `parse_question`.
    To classify they have a text or a list of texts under "inputs", or are a record's fields.

    Args:
      path: local or remote, wherever `etils.epath` reads.
      mode: one of `MODES`.
      choices: choices of lines that have none of their own, to rank.
      shard_id, num_shards: read lines k, k + n, and so on. Other lines are not parsed.

    Raises:
      UserError: for an invalid line. The message has the file and the line number.
    """
    kind = file_type(path).kind
    if mode in ("score", "rank") and kind == "txt":
        raise UserError(f"--mode={mode} needs several texts per example. Use a .jsonl file instead of {path}.")
    is_empty = True
    for number, (line, location) in enumerate(_read_inputs(path)):
        is_empty = False
        if number % num_shards != shard_id:
            continue
        record = _parse_line(line, kind, location) if isinstance(line, bytes) else line
        yield dataclasses.replace(_make_example(record, location, mode, choices), number=number)
    if is_empty:
        raise UserError(f"The input {path} is empty. Write one example per line.")


def parse_question(record: Mapping, default_choices: Sequence[str], location: str) -> Question:
    """Returns the question in an object of a .jsonl file.

    Args:
      record: has "inputs", "choices" unless there are default ones, and "label" (a number) or "targets" (one of the choices).
        Both may be lists if several choices are right. "dataset", "prompt" and "weight" are optional.
      default_choices: choices of records without "choices".
      location: file and line, for messages.

    Raises:
      UserError: for a missing or invalid field.
    """
    choices = record.get("choices", list(default_choices))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise UserError(
            f'{location} has no list of two or more texts under "choices", which --mode=rank needs. Add it, or pass --choice '
            "for every choice if all lines have the same ones."
        )
    label, targets = record.get("label"), record.get("targets")
    labels = label if isinstance(label, list) else [] if label is None else [label]
    if label is None:
        labels = [choices.index(text) for text in (targets if isinstance(targets, list) else [targets]) if text in choices]
    if not labels or not all(type(number) is int and 0 <= number < len(choices) for number in labels):
        raise UserError(
            f'{location} does not name the right choice: "label" is {label!r} and "targets" is {targets!r}. Write a number '
            f"from 0 to {len(choices) - 1}, or the text of a choice. Write a list if several are right."
        )
    weight = record.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise UserError(f'{location} has the "weight" {weight!r}. It must be a number, 0 or more.')
    return Question(
        record["inputs"],
        tuple(choices),
        tuple(labels) if len(labels) > 1 else labels[0],
        str(record.get("dataset", "all")),
        str(record.get("prompt", "only")),
        float(weight),
    )


def _read_inputs(path: str) -> Iterator[tuple[bytes | dict, str]]:
    """Yields (line of a .txt or .jsonl file or row of a table, where it is)."""
    kind, compression = dataclasses.astuple(file_type(path))
    try:
        if kind in ("txt", "jsonl"):
            for number, (line, _) in enumerate(read_lines(path, compression)):
                yield line, f"{path}, line {number + 1}"
        else:
            for number, row in enumerate(read_rows(path, FileType(kind, compression), numbers=("label", "weight"))):
                yield row, f"{path}, row {number + 1}"
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"The input {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _parse_line(line: bytes, kind: str, location: str) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location} is not valid UTF-8 ({error.reason} at byte {error.start}). Correct or remove the line."
        ) from error
    if kind == "txt":
        return {"inputs": text}
    try:
        record = parse_json(text)
    except ValueError as error:
        raise UserError(f"{location} is not JSON: {error}. Every line must be one object.") from error
    if not isinstance(record, dict):
        raise UserError(f'{location} is not an object. Write lines such as {{"inputs": "some text"}}.')
    if re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
        raise UserError(f"{location} contains half of a surrogate pair, which is not text. Correct or remove the line.")
    return record


def _make_example(record: dict[str, Any], location: str, mode: str, choices: Sequence[str]) -> Example:
    if mode == "classify":
        return Example(record, record.get("inputs", record), None, location)
    for name in MODES[mode]:
        if not isinstance(record.get(name), str):
            raise UserError(
                f'{location} has no text under "{name}", which --mode={mode} needs. Write lines such as '
                f'{{"{name}": "some text"}}.'
            )
        if not record[name].strip():
            raise UserError(f'{location} has an empty text under "{name}". Write a text, or remove the line.')
    targets = record.get("targets") if mode == "score" else None
    question = parse_question(record, choices, location) if mode == "rank" else None
    return Example(record, record["inputs"], targets, location, question)


def check_shard(shard_id: int, num_shards: int) -> None:
    """Raises a `UserError` unless 0 <= shard_id < num_shards."""
    if num_shards < 1:
        raise UserError(f"--num_shards is {num_shards}. It must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}. With --num_shards={num_shards} it must be one of 0 … {num_shards - 1}.")
