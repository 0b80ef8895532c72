"""Batch inference, written to JSONL in order and in whole chunks, so that what is there need not be done again."""

import collections
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import tqdm

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation import accuracy, rank
from t5x_lab.evaluation.examples import Example
from t5x_lab.partitioning.distributed import broadcast

BATCHES_OF_CHUNK = 8
# What results are called: a record's own fields of these names, of a run before this one perhaps, are written over.
_WRITTEN = {
    "prediction",
    "score",
    "tokens",
    "characters",
    "is_greedy",
    "cut",
    "label",
    "picks",
    "ties",
    "scores",
    "probabilities",
}


def infer(
    model,
    examples: Iterable[Example],
    output: str,
    *,
    mode: str,
    batch_size: int,
    sampling: dict,
    eos: bool = False,
    max_length: int | None = None,
    settings: dict | None = None,
    writes: bool = True,
    total: int | None = None,
) -> None:
    """Appends one JSON object an example to `output`: its record and the result.

    A chunk of `BATCHES_OF_CHUNK` batches is computed, longest inputs first, put back in order, and written; whole chunks that
    `output` already holds are not computed again. A result does not depend on where a run was interrupted.

    Args:
      model: see `t5x_lab.evaluation`.
      examples: all of them, read as they are needed: no more than a chunk is in memory.
      output: the path of a .jsonl file.
      mode: "predict", "score", "rank" or "classify".
      batch_size: texts at a time, fewer of long ones.
      sampling: arguments of `generate`, to predict.
      eos: whether an end token is scored behind targets and choices that are texts.
      max_length: see `generate` and `scores`.
      settings: whatever else results depend on, as JSON has it, such as the checkpoint. All of it is kept in
        `output`.settings.json, and only a run with the same settings goes on with `output`.
      writes: whether this process reads and writes `output`; of several that work as one, the first does.
      total: the number of examples where it is known, for the progress.

    Raises:
      UserError: when `output` cannot be written, or holds something else than such results.
    """
    if batch_size < 1:
        raise UserError(f"--batch_size is {batch_size}; it must be at least 1.")
    size = batch_size * BATCHES_OF_CHUNK
    how = {"predict": dict(sampling), "classify": {}}.get(mode, {"eos": eos})
    if writes:
        _check_settings(output, {"mode": mode, "max_length": max_length, **how, **(settings or {})})
    waiting = iter(examples)
    done, waiting = _keep_whole_chunks(output, waiting, _RESULTS[mode].name, size) if writes else (0, waiting)
    done = broadcast(done)
    if not writes:
        collections.deque(itertools.islice(waiting, done), maxlen=0)
    options = {"batch_size": batch_size, "max_length": max_length}
    often = {} if sys.stderr.isatty() else {"mininterval": 30.0}
    with tqdm.tqdm(total=total, initial=done, unit="example", disable=not writes, **often) as progress:
        while chunk := list(itertools.islice(waiting, size)):
            results = _RESULTS[mode].compute(model, chunk, how, options)
            for example, result in zip(chunk, results, strict=True):
                if "cut" in result:
                    result["cut"] += example.cut
            lines = [json.dumps({**e.record, **r}, ensure_ascii=False) for e, r in zip(chunk, results, strict=True)]
            if writes:
                with _open(output, "ab") as file:
                    file.write("".join(line + "\n" for line in lines).encode())
                    file.flush()
                    os.fsync(file.fileno())
            progress.update(len(chunk))


def _predictions(model, chunk: Sequence[Example], how: dict, options: dict) -> list[dict]:
    names = [e.where for e in chunk]
    ids, cut = model.fit_prompts([e.inputs for e in chunk], how["max_tokens"], options["max_length"], names)
    texts = model.generate(ids, add_start=False, streams=[e.number for e in chunk], **how, **options)
    return [{"prediction": samples[0], "cut": n} for samples, n in zip(texts, cut, strict=True)]


def _scores(model, chunk: Sequence[Example], how: dict, options: dict) -> list[dict]:
    names = [e.where for e in chunk]
    scores = model.scores([e.inputs for e in chunk], [e.targets for e in chunk], eos=how["eos"], names=names, **options)
    characters = [len(example.record["targets"]) for example in chunk]
    columns = zip(scores.log_prob, scores.tokens, characters, scores.is_greedy, scores.cut, strict=True)
    return [
        {"score": float(score), "tokens": int(tokens), "characters": n, "is_greedy": bool(greedy), "cut": int(cut)}
        for score, tokens, n, greedy, cut in columns
    ]


def _picks(model, chunk: Sequence[Example], how: dict, options: dict) -> list[dict]:
    questions = [e.question for e in chunk if e.question is not None]
    found = rank.answers(model, questions, [e.where for e in chunk], eos=how["eos"], **options)
    return [a.as_json(q) for q, a in zip(questions, found, strict=True)]


def _classes(model, chunk: Sequence[Example], how: dict, options: dict) -> list[dict]:
    found = model.classify([e.inputs for e in chunk], names=[e.where for e in chunk], batch_size=options["batch_size"])
    return [one.as_json() for one in found]


class _Result(NamedTuple):
    """The field of a line that says it is done, and what computes the lines of a chunk."""

    name: str
    compute: Callable


_RESULTS = {
    "predict": _Result("prediction", _predictions),
    "score": _Result("score", _scores),
    "rank": _Result("picks", _picks),
    "classify": _Result("probabilities", _classes),
}


def rank_report(output: str, choices: Sequence[str] = ()) -> dict:
    """The accuracies of a complete `output`; see `t5x_lab.evaluation.accuracy.report`. `choices` are those of lines that
    have none."""
    with open(output, encoding="utf-8") as file:
        first, second = itertools.tee(map(json.loads, file))
        questions = (_question_of(line, choices) for line in first)
        found = (rank.answer(line["scores"], line["tokens"], line["characters"], line["cut"]) for line in second)
        return accuracy.report(questions, found)


def _question_of(line: dict, choices: Sequence[str]) -> rank.Question:
    """Of a line of ours, which was checked before it was answered."""
    label = tuple(line["label"]) if isinstance(line["label"], list) else line["label"]
    named = str(line.get("dataset", "all")), str(line.get("prompt", "only"))
    return rank.Question("", tuple(line.get("choices", choices)), label, *named, float(line.get("weight", 1.0)))


def _check_settings(output: str, settings: dict) -> None:
    """Says with what an `output` that is there was made differently; notes the settings of a new one."""
    path = f"{output}.settings.json"
    if os.path.exists(output) and os.path.getsize(output):
        if not os.path.exists(path):
            raise UserError(
                f"{output} is there without {os.path.basename(path)}, which would say how it was made. Name another --output, "
                "or move that file away; it was not touched."
            )
        with _open(path, "r") as file:
            before = json.load(file)
        for name, value in settings.items():
            if before.get(name) != value:
                raise UserError(
                    f"{output} was begun with {name} = {json.dumps(before.get(name))}, not {json.dumps(value)}; results of "
                    "both in one file would tell nothing. Name another --output, or move that file away."
                )
    else:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        with _open(path, "w") as file:
            json.dump(settings, file)


def _keep_whole_chunks(output: str, examples: Iterator[Example], result: str, size: int) -> tuple[int, Iterator[Example]]:
    """Cuts off what a crash left behind the last whole chunk; returns the number of lines that stay, and the examples after
    them."""
    if not os.path.exists(output):
        _open(output, "wb").close()
        return 0, examples
    whole, end = 0, 0  # lines of whole chunks, and their bytes
    behind: list[Example] = []  # of the chunk that is not whole
    bytes_behind = 0
    with _open(output, "rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):  # it was cut off
                if not line.startswith(b"{"):
                    raise UserError(
                        f"{output} does not hold results. Name another --output, or move that file away; it was not touched."
                    )
                break
            number = whole + len(behind) + 1
            example = next(examples, None)
            if example is None or not _is_result(line, example, result):
                raise UserError(
                    f'{output}, line {number} is not the "{result}" of example {number} of the input. Name another '
                    "--output, or move that file away; it was not touched."
                )
            behind.append(example)
            bytes_behind += len(line)
            if len(behind) == size:
                whole, end, behind, bytes_behind = whole + size, end + bytes_behind, [], 0
        after = next(examples, None)
        if after is None:  # the last chunk is a short one
            whole, end, behind = whole + len(behind), end + bytes_behind, []
        file.truncate(end)
    return whole, itertools.chain(behind, [] if after is None else [after], examples)


def _is_result(line: bytes, example: Example, result: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    if not isinstance(found, dict) or result not in found:
        return False
    return all(found.get(name) == value for name, value in example.record.items() if name not in _WRITTEN)


def _open(output: str, mode: str):
    try:
        return open(output, mode)
    except OSError as error:
        raise UserError(f"The output {output} cannot be written: {error.strerror}. Name another --output.") from error
