"""Examples to infer on: lines of a .txt or .jsonl file, or what a SeqIO task makes of its data."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import seqio
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.data.cutting import cut_right
from t5x_lab.data.reading import in_order
from t5x_lab.evaluation.rank import Question, question_of

MODES = {"predict": ("inputs",), "score": ("inputs", "targets"), "rank": ("inputs",), "classify": ("inputs",)}


@dataclasses.dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
      record: what is written about it, beside the result.
      inputs, targets: texts, or token ids as a task prepared them; targets only to score. To classify, inputs are what
        `Run.classify` takes, or the token ids of the sequences.
      where: where it stands, for messages.
      question: only to rank.
      number: among all examples, of all shards.
      cut: tokens that were cut from the inputs.
    """

    record: dict
    inputs: Any
    targets: str | list[int] | None
    where: str
    question: Question | None = None
    number: int = 0
    cut: int = 0


def read_examples(
    path: str, mode: str, choices: Sequence[str] = (), shard_id: int = 0, num_shards: int = 1
) -> Iterator[Example]:
    """Examples of a .txt file (one input a line) or a .jsonl file: objects with "inputs", to score also "targets", to rank
    what `question_of` reads, to classify a text or a list of them under "inputs", or the fields of a record. Either may be
    compressed (.gz, .zst), and lie wherever `etils.epath` reads.

    Lines come one after the other; of several shards each parses its own alone.

    Raises:
      UserError: naming the file and the line.
    """
    kind = path.removesuffix(".gz").removesuffix(".zst")
    if mode in ("score", "rank") and not kind.endswith(".jsonl"):
        raise UserError(f"--mode={mode} needs more than one text of each example; give a .jsonl file instead of {path}.")
    empty = True
    for number, raw in enumerate(_lines(path)):
        empty = False
        if number % num_shards != shard_id:
            continue
        where = f"{path}, line {number + 1}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not valid UTF-8 ({error.reason} at byte {error.start}). Correct or remove the line."
            ) from error
        yield dataclasses.replace(_parse(line, kind.endswith(".jsonl"), where, mode, choices), number=number)
    if empty:
        raise UserError(f"The input {path} is empty; give one example a line.")


def _lines(path: str) -> Iterator[bytes]:
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(epath.Path(path).open("rb"))
            if path.endswith(".gz"):
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif path.endswith(".zst"):
                file = stack.enter_context(io.BufferedReader(pa.CompressedInputStream(file, "zstd")))
            for number, line in enumerate(file):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"The input {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


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
    if mode == "classify":
        return Example(record, record.get("inputs", record), None, where)
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


def task_examples(
    tasks,
    split: str,
    mode: str,
    vocabulary,
    *,
    ends: tuple[int, ...] = (),
    cut: bool = True,
    shard_id: int = 0,
    num_shards: int = 1,
) -> Iterator[Example]:
    """Examples of a task or of the tasks of a mixture, one after the other; to rank, the questions of `evaluation.ranking`;
    to classify, sequences of token ids.

    Args:
      tasks: a `t5x_lab.data.mixture.WeightedTasks`.
      split: such as "validation".
      mode: one of `MODES`.
      vocabulary: the model's.
      ends: its end tokens.
      cut: whether inputs are cut to TASK_FEATURE_LENGTHS, on the right, before their end token, as in training.
      shard_id, num_shards: of the examples, number k, k + n, and so on.

    Raises:
      UserError: when a task has no such split, no targets to score, no choices to rank, or another vocabulary.
    """
    from t5x_lab.evaluation.classification import classified_examples
    from t5x_lab.evaluation.ranking import ranked_examples

    for part in tasks.parts:
        task = part.task
        if split not in task.splits:
            raise UserError(f'Task "{task.name}" has no split "{split}"; it has {", ".join(sorted(task.splits))}.')
        for name in MODES[mode][1:]:
            if name not in task.output_features:
                raise UserError(f'Task "{task.name}" has no "{name}", which --mode={mode} needs.')
        if mode != "classify" and getattr(task, "classification", None):
            raise UserError(f'The task "{task.name}" is one to classify; give --mode=classify.')
        for name, feature in task.output_features.items():
            if feature.vocabulary != vocabulary and not isinstance(feature.vocabulary, seqio.PassThroughVocabulary):
                raise UserError(
                    f'Feature "{name}" of task "{task.name}" has the vocabulary {feature.vocabulary}, the checkpoint was '
                    f"trained with {vocabulary}. The same numbers would mean other words; prepare the task with that one."
                )
    cut_to = (lambda part, ids: cut_right(ids, part.sequence_length.get("inputs"), ends)) if cut else (lambda part, ids: ids)
    of_part = {"rank": ranked_examples, "classify": classified_examples}.get(mode, _examples_of_part)
    everything = itertools.chain.from_iterable(of_part(tasks, part, split, cut_to) for part in tasks.parts)
    for number, example in enumerate(everything):
        if number % num_shards == shard_id:
            yield dataclasses.replace(example, number=number)


def _examples_of_part(tasks, part, split: str, cut_to: Callable) -> Iterator[Example]:
    task = part.task
    for number, example in enumerate(in_order(part, split).as_numpy_iterator()):
        where = f'task "{task.name}", {split}, example {number}'
        ids = {name: example[name].tolist() for name in task.output_features if name in example}
        texts = {name: text_of(example, name, tasks.vocabulary) for name in ("inputs", "targets") if name in ids}
        whole = ids.get("inputs", [])
        inputs = cut_to(part, whole)
        record = {"task": task.name, "inputs": "", **texts}
        yield Example(record, [*part.before_inputs, *inputs], ids.get("targets"), where, cut=len(whole) - len(inputs))


def text_of(example, name: str, vocabulary) -> str:
    """The text of a feature of a task's example: as it was before it was tokenised, or decoded."""
    before = example.get(f"{name}_pretokenized")
    return before.decode("utf-8", "replace") if isinstance(before, bytes) else vocabulary.decode(example[name].tolist())


def check_shard(shard_id: int, num_shards: int) -> None:
    """Raises a `UserError` unless it is one of so many."""
    if num_shards < 1:
        raise UserError(f"--num_shards is {num_shards}; it must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}; with --num_shards={num_shards} it is one of 0 … {num_shards - 1}.")
