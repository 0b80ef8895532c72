"""Batch inference to JSONL, in order and in whole chunks, so that an interrupted run resumes."""

import collections
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import tqdm
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.evaluation.examples import Example
from t5x_lab.evaluation.inference.output import SETTINGS, Output
from t5x_lab.evaluation.questions import Question, make_answer
from t5x_lab.evaluation.ranking import accuracy
from t5x_lab.evaluation.ranking.scoring import answer_questions
from t5x_lab.partitioning.distributed import broadcast

BATCHES_PER_CHUNK = 8
# Fields of results. Fields of these names in an input record, perhaps from an earlier run, are overwritten.
_RESULT_FIELDS = {
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
    """Appends one JSON object per example to `output`: its record and the result.

    A chunk of `BATCHES_PER_CHUNK` batches is computed with the longest inputs first, put back in order, and written. Whole
    chunks that `output` already holds are not computed again. Results do not depend on where a run was interrupted.

    Args:
      model: see `t5x_lab.evaluation`.
      examples: all of them. They are read lazily, and one chunk is in memory.
      output: path of a .jsonl file.
      mode: "predict", "score", "rank" or "classify".
      batch_size: texts per batch. Batches of long texts are smaller.
      sampling: arguments of `generate`, to predict.
      eos: whether an EOS token is scored after targets and choices that are texts.
      max_length: see `generate` and `scores`.
      settings: everything else that results depend on, such as the checkpoint. It is stored in `output`.settings.json, and
        only a run with the same settings resumes.
      writes: whether this process reads and writes `output`. Of several processes that work together, the first one does.
      total: number of examples if known, for the progress bar.

    Raises:
      UserError: if `output` cannot be written, or holds something else.
    """
    if batch_size < 1:
        raise UserError(f"--batch_size is {batch_size}; it must be at least 1.")
    size = batch_size * BATCHES_PER_CHUNK
    mode_options = {"predict": dict(sampling), "classify": {}}.get(mode, {"eos": eos})
    remaining, done = iter(examples), 0
    with Output(output) if writes else contextlib.nullcontext() as file:
        if file:
            _check_settings(file, {"mode": mode, "max_length": max_length, **mode_options, **(settings or {})})
            done, remaining = _keep_whole_chunks(file, remaining, _RESULTS[mode].name, size)
        done = broadcast(done)
        if not file:
            collections.deque(itertools.islice(remaining, done), maxlen=0)
        options = {"batch_size": batch_size, "max_length": max_length}
        interval = {} if sys.stderr.isatty() else {"mininterval": 30.0}
        with tqdm.tqdm(total=total, initial=done, unit="example", disable=not writes, **interval) as progress:
            while chunk := list(itertools.islice(remaining, size)):
                results = _RESULTS[mode].compute(model, chunk, mode_options, options)
                for example, result in zip(chunk, results, strict=True):
                    if "cut" in result:
                        result["cut"] += example.cut
                lines = [json.dumps({**e.record, **r}, ensure_ascii=False) for e, r in zip(chunk, results, strict=True)]
                if file:
                    file.append("".join(line + "\n" for line in lines).encode())
                progress.update(len(chunk))


def _predictions(model, chunk: Sequence[Example], sampling: dict, options: dict) -> list[dict]:
    names = [e.location for e in chunk]
    ids, cut = model.truncate_prompts([e.inputs for e in chunk], sampling["max_tokens"], options["max_length"], names)
    texts = model.generate(ids, add_start=False, streams=[e.number for e in chunk], **sampling, **options)
    return [{"prediction": samples[-1], "cut": n} for samples, n in zip(texts, cut, strict=True)]  # the most likely is the last


def _scores(model, chunk: Sequence[Example], mode_options: dict, options: dict) -> list[dict]:
    names = [e.location for e in chunk]
    scores = model.scores(
        [e.inputs for e in chunk], [e.targets for e in chunk], eos=mode_options["eos"], names=names, **options
    )
    characters = [len(example.record["targets"]) for example in chunk]
    columns = zip(scores.log_prob, scores.tokens, characters, scores.is_greedy, scores.cut, strict=True)
    return [
        {"score": float(score), "tokens": int(tokens), "characters": n, "is_greedy": bool(greedy), "cut": int(cut)}
        for score, tokens, n, greedy, cut in columns
    ]


def _picks(model, chunk: Sequence[Example], mode_options: dict, options: dict) -> list[dict]:
    questions = [e.question for e in chunk if e.question is not None]
    answers = answer_questions(model, questions, [e.location for e in chunk], eos=mode_options["eos"], **options)
    return [answer.to_json(question) for question, answer in zip(questions, answers, strict=True)]


def _classes(model, chunk: Sequence[Example], mode_options: dict, options: dict) -> list[dict]:
    names = [e.location for e in chunk]
    predictions = model.classify([e.inputs for e in chunk], names=names, batch_size=options["batch_size"])
    return [prediction.to_json() for prediction in predictions]


class _Result(NamedTuple):
    """Required field of a result, and the function that computes the results of a chunk."""

    name: str
    compute: Callable


_RESULTS = {
    "predict": _Result("prediction", _predictions),
    "score": _Result("score", _scores),
    "rank": _Result("picks", _picks),
    "classify": _Result("probabilities", _classes),
}


def ranking_report(output: str, choices: Sequence[str] = ()) -> dict:
    """Returns the accuracies of a complete `output`. See `t5x_lab.evaluation.ranking.accuracy.report`.

    Args:
      output: path of the .jsonl file.
      choices: choices of lines that have none of their own.
    """
    with epath.Path(output).open("r") as file:
        first, second = itertools.tee(map(parse_json, file))
        questions = (_read_question(line, choices) for line in first)
        answers = (make_answer(line["scores"], line["tokens"], line["characters"], line["cut"]) for line in second)
        return accuracy.report(questions, answers)


def _read_question(line: dict, choices: Sequence[str]) -> Question:
    """Returns the question in a result line, which was validated before it was answered."""
    label = tuple(line["label"]) if isinstance(line["label"], list) else line["label"]
    group = str(line.get("dataset", "all")), str(line.get("prompt", "only"))
    return Question("", tuple(line.get("choices", choices)), label, *group, float(line.get("weight", 1.0)))


def _check_settings(output: Output, settings: dict) -> None:
    """Raises a `UserError` if an existing output was written with other settings. Stores the settings of a new one."""
    if os.path.exists(output.local) and os.path.getsize(output.local):
        if not os.path.exists(output.settings):
            raise UserError(
                f"{output.path} exists without {os.path.basename(output.settings)}, which records its settings. Set another "
                "--output, or move that file away. It was not changed."
            )
        try:
            with output.open_settings("r") as file:
                stored = dict(parse_json(file.read()))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{output.path}{SETTINGS} is damaged: {error}. Set another --output, or move both files away."
            ) from error
        for name, value in settings.items():
            if stored.get(name) != value:
                raise UserError(
                    f"{output.path} was written with {name} = {json.dumps(stored.get(name))}, not {json.dumps(value)}. Results "
                    "of both cannot share a file. Set another --output, or move that file away."
                )
    else:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(os.path.abspath(output.local)), exist_ok=True)
        with output.open_settings("w") as file:
            json.dump(settings, file)


def _keep_whole_chunks(output: Output, examples: Iterator[Example], result: str, size: int) -> tuple[int, Iterator[Example]]:
    """Truncates an output after its last whole chunk.

    Returns:
      (number of lines that stay, the examples after them)
    """
    if not os.path.exists(output.local):
        output.open("wb").close()
        return 0, examples
    num_lines, end = 0, 0  # lines and bytes of whole chunks
    pending: list[Example] = []  # examples of the incomplete chunk
    pending_bytes = 0
    with output.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):  # a partly written line
                if not line.startswith(b"{"):
                    raise UserError(
                        f"{output.path} does not hold results. Set another --output, or move that file away. It was not "
                        "changed."
                    )
                break
            number = num_lines + len(pending) + 1
            example = next(examples, None)
            if example is None or not _is_result(line, example, result):
                raise UserError(
                    f'{output.path}, line {number} is not the "{result}" of example {number} of the input. Set another '
                    "--output, or move that file away. It was not changed."
                )
            pending.append(example)
            pending_bytes += len(line)
            if len(pending) == size:
                num_lines, end, pending, pending_bytes = num_lines + size, end + pending_bytes, [], 0
        following = next(examples, None)
        if following is None:  # the last chunk is a short one
            num_lines, end, pending = num_lines + len(pending), end + pending_bytes, []
    output.truncate(end)
    return num_lines, itertools.chain(pending, [] if following is None else [following], examples)


def _is_result(line: bytes, example: Example, result: str) -> bool:
    try:
        fields = parse_json(line)
    except ValueError:
        return False
    if not isinstance(fields, dict) or result not in fields:
        return False
    return all(fields.get(name) == value for name, value in example.record.items() if name not in _RESULT_FIELDS)
