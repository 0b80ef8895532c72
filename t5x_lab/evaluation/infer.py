"""Batch inference over the examples of a file, written to JSONL in order, so that what is there need not be done again."""

import contextlib
import json
import os
from collections.abc import Sequence

import tqdm

from t5x_lab.config.errors import UserError
from t5x_lab.runs.run import Run

Example = dict[str, str]


def read_examples(path: str, mode: str) -> list[Example]:
    """Examples of a .txt file (one input a line) or a .jsonl file (objects with "inputs", to score also "targets").

    Raises:
      UserError: naming the file and the line.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"The input {path} cannot be read: {error.strerror}.") from error
    examples = []
    for number, raw in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not valid UTF-8 ({error.reason} at byte {error.start}). Mend or remove the line."
            ) from error
        examples.append(_parse(line, path.endswith(".jsonl"), where, mode))
    if not examples:
        raise UserError(f"The input {path} is empty; give one example a line.")
    return examples


def _parse(line: str, is_json: bool, where: str, mode: str) -> Example:
    example = {"inputs": line}
    if is_json:
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error}. Every line is one object.") from error
    needed = ["inputs"] + ["targets"] * (mode == "score")
    for name in needed:
        if not isinstance(example, dict) or not isinstance(example.get(name), str):
            raise UserError(
                f'{where} has no text under "{name}", which --mode={mode} needs. Write lines like {{"{name}": "…"}}.'
            )
    return example


def shard(examples: list[Example], shard_id: int, num_shards: int) -> list[Example]:
    """The examples of one of `num_shards` processes."""
    if num_shards < 1:
        raise UserError(f"--num_shards is {num_shards}; it must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}; with --num_shards={num_shards} it is one of 0 … {num_shards - 1}.")
    return examples[shard_id::num_shards]


def infer(model: Run, examples: Sequence[Example], output: str, *, mode: str, batch_size: int, sampling: dict) -> None:
    """Appends one JSON object an example to `output`: the example, and its "prediction" or "score".

    Whole batches that `output` already holds are kept, and their examples not computed again.

    Raises:
      UserError: when `output` cannot be written, or holds something else than such results.
    """
    if batch_size < 1:
        raise UserError(f"--batch_size is {batch_size}; it must be at least 1.")
    result = {"score": "score", "predict": "prediction"}[mode]
    done = _keep_whole_batches(output, examples, result, batch_size)
    sampling = dict(sampling)
    seed = sampling.pop("seed", 0)
    with _open(output, "ab") as file:
        for start in tqdm.tqdm(range(done, len(examples), batch_size), unit="batch", disable=None):
            batch = examples[start : start + batch_size]
            inputs = [example["inputs"] for example in batch]
            if mode == "score":
                values = model.score(inputs, [example["targets"] for example in batch]).tolist()
            else:
                values = [texts[0] for texts in model.generate(inputs, seed=seed + start, **sampling)]
            lines = [json.dumps({**e, result: value}, ensure_ascii=False) for e, value in zip(batch, values, strict=True)]
            file.write("".join(line + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def _keep_whole_batches(output: str, examples: Sequence[Example], result: str, batch_size: int) -> int:
    """Cuts off what a crash left behind the last whole batch; returns the number of lines that stay."""
    if not os.path.exists(output):
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        _open(output, "wb").close()
        return 0
    with _open(output, "rb+") as file:
        lines = file.read().split(b"\n")
        lines, rest = lines[:-1], lines[-1]  # what follows the last line break was cut off
        for number, line in enumerate(lines, start=1):
            if number > len(examples) or not _is_result(line, examples[number - 1], result):
                raise UserError(
                    f'{output}, line {number} is not the "{result}" of example {number} of the input. Name another '
                    "--output, or move that file away; it was not touched."
                )
        if rest and not rest.startswith(b"{"):
            raise UserError(
                f"{output} does not hold results. Name another --output, or move that file away; it was not touched."
            )
        whole = len(lines) if len(lines) == len(examples) else len(lines) // batch_size * batch_size
        file.truncate(sum(len(line) + 1 for line in lines[:whole]))
    return whole


def _is_result(line: bytes, example: Example, result: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("inputs") == example["inputs"] and result in found


def _open(output: str, mode: str):
    try:
        return open(output, mode)
    except OSError as error:
        raise UserError(f"The output {output} cannot be written: {error.strerror}. Name another --output.") from error
