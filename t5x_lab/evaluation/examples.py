"""Examples to infer on: lines of a .txt or .jsonl file, or what a SeqIO task makes of its data."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.rank import Question, question_of

MODES = {"predict": ("inputs",), "score": ("inputs", "targets"), "rank": ("inputs",)}


@dataclasses.dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
      record: what is written about it, beside the result.
      inputs, targets: texts, or token ids as a task prepared them; targets only to score.
      where: where it stands, for messages.
      question: only to rank.
    """

    record: dict
    inputs: str | list[int]
    targets: str | list[int] | None
    where: str
    question: Question | None = None


def read_examples(path: str, mode: str, choices: Sequence[str] = ()) -> list[Example]:
    """Examples of a .txt file (one input a line) or a .jsonl file: objects with "inputs", to score also "targets", to rank
    what `question_of` reads.

    Raises:
      UserError: naming the file and the line.
    """
    try:
        with open(path, "rb") as file:
            lines = [line.removesuffix(b"\r") for line in file.read().removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    except OSError as error:
        raise UserError(f"The input {path} cannot be read: {error.strerror}.") from error
    if not lines[-1]:
        lines.pop()  # what follows the last line break
    if mode != "predict" and not path.endswith(".jsonl"):
        raise UserError(f"--mode={mode} needs more than one text of each example; give a .jsonl file instead of {path}.")
    examples = []
    for number, raw in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not valid UTF-8 ({error.reason} at byte {error.start}). Correct or remove the line."
            ) from error
        examples.append(_parse(line, path.endswith(".jsonl"), where, mode, choices))
    if not examples:
        raise UserError(f"The input {path} is empty; give one example a line.")
    return examples


def _parse(line: str, is_json: bool, where: str, mode: str, choices: Sequence[str]) -> Example:
    record = {"inputs": line}
    if is_json:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error}. Every line is one object.") from error
        if not isinstance(record, dict):
            raise UserError(f'{where} is not an object. Write lines like {{"inputs": "…"}}.')
        if re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
            raise UserError(f"{where} holds half of a surrogate pair, which is no text. Correct or remove the line.")
    for name in MODES[mode]:
        if not isinstance(record.get(name), str):
            raise UserError(
                f'{where} has no text under "{name}", which --mode={mode} needs. Write lines like {{"{name}": "…"}}.'
            )
        if not record[name].strip():
            raise UserError(f'{where} has an empty text under "{name}". Write something there, or remove the line.')
    targets = record.get("targets") if mode == "score" else None
    question = question_of(record, choices, where) if mode == "rank" else None
    return Example(record, record["inputs"], targets, where, question)


def task_examples(tasks, split: str, mode: str, vocabulary) -> Iterator[Example]:
    """Examples of a task or of the tasks of a mixture, one after the other, not cut to any length.

    Args:
      tasks: a `t5x_lab.data.mixture.WeightedTasks`.
      split: such as "validation".
      mode: one of `MODES`.
      vocabulary: the model's.

    Raises:
      UserError: when a task has no such split, no targets to score, or another vocabulary.
    """
    if mode == "rank":
        raise UserError(
            "--mode=rank reads files. A task that ranks says so itself, with SeqIO's score metrics; run t5x_lab eval on it."
        )
    for part in tasks.parts:
        task = part.task
        if split not in task.splits:
            raise UserError(f'Task "{task.name}" has no split "{split}"; it has {", ".join(sorted(task.splits))}.')
        for name in MODES[mode][1:]:
            if name not in task.output_features:
                raise UserError(f'Task "{task.name}" has no "{name}", which --mode={mode} needs.')
        for name, feature in task.output_features.items():
            if feature.vocabulary != vocabulary:
                raise UserError(
                    f'Feature "{name}" of task "{task.name}" has the vocabulary {feature.vocabulary}, the checkpoint was '
                    f"trained with {vocabulary}. The same numbers would mean other words; prepare the task with that one."
                )
        data = task.get_dataset(
            part.sequence_length, split=split, shuffle=False, seed=0, num_epochs=1, use_cached=False, trim_output_features=False
        )
        for number, example in enumerate(data.as_numpy_iterator()):
            where = f'task "{task.name}", {split}, example {number}'
            ids = {name: example[name].tolist() for name in task.output_features if name in example}
            texts = {name: text_of(example, name, vocabulary) for name in ("inputs", "targets") if name in ids}
            inputs = ids.get("inputs", [])
            yield Example({"task": task.name, "inputs": "", **texts}, inputs, ids.get("targets"), where)


def text_of(example, name: str, vocabulary) -> str:
    """The text of a feature of a task's example: as it was before it was tokenised, or decoded."""
    before = example.get(f"{name}_pretokenized")
    return before.decode("utf-8", "replace") if isinstance(before, bytes) else vocabulary.decode(example[name].tolist())


def shard(examples: list[Example], shard_id: int, num_shards: int) -> list[Example]:
    """The examples of one of `num_shards` processes."""
    if num_shards < 1:
        raise UserError(f"--num_shards is {num_shards}; it must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}; with --num_shards={num_shards} it is one of 0 … {num_shards - 1}.")
    return examples[shard_id::num_shards]
