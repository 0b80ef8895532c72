"""Examples for inference from .txt and .jsonl files."""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.evaluation.examples import Example
from t5x_lab.evaluation.questions import Question

MAX_LINE_BYTES = 1 << 26
# Fields that a line must have, by the mode of `t5x_lab infer`.
MODES = {"predict": ("inputs",), "score": ("inputs", "targets"), "rank": ("inputs",), "classify": ("inputs",)}


def read_examples(
    path: str, mode: str, choices: Sequence[str] = (), shard_id: int = 0, num_shards: int = 1
) -> Iterator[Example]:
    """Reads examples from a .txt file (one input per line) or a .jsonl file, which may be compressed (.gz, .zst).

    Objects of a .jsonl file have "inputs". To score they also have "targets". To rank see `parse_question`. To classify they
    have a text or a list of texts under "inputs", or are a record's fields.

    Args:
      path: local or remote, wherever `etils.epath` reads.
      mode: one of `MODES`.
      choices: choices of lines that have none of their own, to rank.
      shard_id, num_shards: read lines k, k + n, and so on. Other lines are not parsed.

    Raises:
      UserError: for an invalid line. The message has the file and the line number.
    """
    kind = path.removesuffix(".gz").removesuffix(".zst")
    if mode in ("score", "rank") and not kind.endswith(".jsonl"):
        raise UserError(f"--mode={mode} needs several texts per example. Use a .jsonl file instead of {path}.")
    is_empty = True
    for number, raw in enumerate(_read_lines(path)):
        is_empty = False
        if number % num_shards != shard_id:
            continue
        location = f"{path}, line {number + 1}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{location} is not valid UTF-8 ({error.reason} at byte {error.start}). Correct or remove the line."
            ) from error
        yield dataclasses.replace(_parse_line(line, kind.endswith(".jsonl"), location, mode, choices), number=number)
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


def _read_lines(path: str) -> Iterator[bytes]:
    if epath.Path(path).exists() and not is_regular_file(path):
        raise UserError(
            f"The input {path} is not a file. It is read more than once, so it cannot be a pipe. Write it to a file."
        )
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(epath.Path(path).open("rb"))
            if path.endswith(".gz"):
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif path.endswith(".zst"):
                file = stack.enter_context(io.BufferedReader(pa.CompressedInputStream(file, "zstd")))
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(f"{path}, line {number + 1} has more than {MAX_LINE_BYTES:,} bytes. Split or remove it.")
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"The input {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _parse_line(line: str, is_json: bool, location: str, mode: str, choices: Sequence[str]) -> Example:
    record = {"inputs": line}
    if is_json:
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UserError(f"{location} is not JSON: {error}. Every line must be one object.") from error
        if not isinstance(record, dict):
            raise UserError(f'{location} is not an object. Write lines such as {{"inputs": "some text"}}.')
        if re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
            raise UserError(f"{location} contains half of a surrogate pair, which is not text. Correct or remove the line.")
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
