"""Batch inference over the examples of a file, written to JSONL in order, so that what is there need not be done again."""

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
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}; with --num_shards={num_shards} it is one of 0 … {num_shards - 1}.")
    return examples[shard_id::num_shards]


def infer(model: Run, examples: Sequence[Example], output: str, *, mode: str, batch_size: int, sampling: dict) -> None:
    """Appends one JSON object an example to `output`: the example, and its "prediction" or "score".

    Whole lines that `output` already holds are kept, and their examples not computed again.
    """
    done = _keep_whole_lines(output, examples)
    with open(output, "a", encoding="utf-8") as file:
        for start in tqdm.tqdm(range(done, len(examples), batch_size), unit="batch", disable=None):
            batch = examples[start : start + batch_size]
            inputs = [example["inputs"] for example in batch]
            if mode == "score":
                values = model.score(inputs, [example["targets"] for example in batch]).tolist()
                results = [{"score": value} for value in values]
            else:
                results = [{"prediction": texts[0]} for texts in model.generate(inputs, **sampling)]
            file.writelines(json.dumps({**e, **r}, ensure_ascii=False) + "\n" for e, r in zip(batch, results, strict=True))
            file.flush()
            os.fsync(file.fileno())


def _keep_whole_lines(output: str, examples: Sequence[Example]) -> int:
    """Cuts off a last line that a crash left unfinished; returns the number of lines that stay."""
    if not os.path.exists(output):
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        return 0
    with open(output, "rb+") as file:
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        file.truncate(len(whole))
    lines = whole.splitlines()
    for example, line in zip(examples, lines, strict=False):
        if json.loads(line).get("inputs") != example["inputs"]:
            raise UserError(f"{output} holds results of other inputs. Name another --output, or move that file away.")
    if len(lines) > len(examples):
        raise UserError(f"{output} holds {len(lines)} results for {len(examples)} examples. Name another --output.")
    return len(lines)
