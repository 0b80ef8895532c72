"""Adapter of a t5x_lab model for lm-eval (EleutherAI), used by `t5x_lab harness`.

The context is the encoder's input, or the decoder's prefix, which a prefix decoder reads in both directions. As in lm-eval,
context and continuation are tokenized separately for an encoder-decoder, and as one text for a decoder.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.vocabularies.huggingface import HuggingFaceTokenizer
from t5x_lab.evaluation.harness.data_files import write_task_files
from t5x_lab.evaluation.harness.random_baseline import random_baseline
from t5x_lab.evaluation.questions import Answer, Question, make_answer
from t5x_lab.evaluation.ranking import accuracy

_UNREADABLE = "have an empty context, which a model without a start or EOS token cannot read"


class HarnessModel(TemplateLM):
    """A t5x_lab model that answers the requests of lm-eval.

    Args:
      model: see `t5x_lab.evaluation`.
      batch_size: texts per batch. Batches of long texts are smaller.
      max_length: maximum tokens of an encoder's input, or of a decoder's context and continuation. Longer contexts are
        truncated from the left and counted. Default: the length the model was trained at if known, else 2048.
      max_gen_toks: maximum tokens to generate if a task has no limit.
    """

    def __init__(
        self,
        model,
        batch_size: int | str = 32,
        max_length: int | None = None,
        max_gen_toks: int = 256,
    ):
        super().__init__()
        if model.input_vocabulary != model.vocabulary:
            raise UserError("lm-eval's tasks need one vocabulary of inputs and targets, but the model has an INPUT_VOCABULARY.")
        self.model, self.vocabulary = model, model.vocabulary
        self.has_encoder = model.has_encoder
        self.backend = "seq2seq" if self.has_encoder else "causal"
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else 32  # lm-eval may say "auto"
        positions = model.max_positions
        self.max_length = min(n for n in (max_length or model.trained_length or 2048, positions) if n)
        self.max_gen_toks = max_gen_toks
        self.cut = 0

    @property
    def tokenizer_name(self) -> str:
        return str(self.vocabulary)

    @property
    def eot_token_id(self) -> int:
        return self.model.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token of an empty context: the decoder's start token, or the BOS token of its tokenizer, or EOS."""
        start = None if self.has_encoder else self.model.special_tokens.start
        bos = self.vocabulary.bos_id if isinstance(self.vocabulary, HuggingFaceTokenizer) else None
        return next(i for i in (start, bos, self.eot_token_id) if i is not None)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused) -> list[int]:
        """Returns ids with the special tokens around a text, as lm-eval's own models do."""
        ids = list(self.vocabulary.encode(string))
        if add_special_tokens is False:
            return ids
        prefix, suffix = self.model.input_affixes
        return self._add_prefix(prefix, [*ids, *suffix] if self.has_encoder else ids)

    def _add_prefix(self, prefix: Sequence[int], ids: list[int]) -> list[int]:
        """Prepends the start token, unless the ids begin with it, and the input prefix."""
        if self.has_encoder:
            return [*prefix, *ids]
        start = self.model.special_tokens.start
        return ids if start in ids[:1] else [*(() if start is None else (start,)), *prefix, *ids]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **unused) -> list[tuple[float, bool]]:
        suffix = self._context_suffix
        contexts = [[*context, *suffix] if context != [self.prefix_token_id] else context for _, context, _ in requests]
        contexts = [context or self._empty_context for context in contexts]
        results = self._score_pairs(contexts, [continuation for _, _, continuation in requests])
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    @property
    def _context_suffix(self) -> list[int]:
        """Ids after a decoder's context, if it was trained with an EOS token after its inputs."""
        return [] if self.has_encoder else self.model.input_affixes[1]

    @property
    def _empty_context(self) -> list[int]:
        """Ids of a context without tokens, such as a space. An encoder reads at least its EOS token."""
        return [self.prefix_token_id]

    def _score_pairs(self, contexts: Sequence[list[int]], continuations: Sequence[list[int]]) -> list[tuple[float, bool]]:
        """Returns (log-probability, whether greedy decoding gives it) of each continuation, (-inf, False) if unreadable."""
        results = [(-math.inf, False)] * len(contexts)
        readable = [i for i, context in enumerate(contexts) if context[0] >= 0]
        self._log_unfit(len(contexts) - len(readable), len(contexts), _UNREADABLE, "-inf")
        fitting = [i for i in readable if len(continuations[i]) <= self.max_length]
        longest = max(map(len, continuations), default=0)
        too_long = f"have continuations of up to {longest} tokens, beyond the {self._limit}"
        self._log_unfit(len(readable) - len(fitting), len(contexts), too_long, "-inf")
        options = dict(max_length=self.max_length, batch_size=self.batch_size, add_start=False)
        scores = self.model.scores([contexts[i] for i in fitting], [continuations[i] for i in fitting], **options)
        for i, log_prob, is_greedy in zip(fitting, scores.log_prob.tolist(), scores.is_greedy.tolist(), strict=True):
            results[i] = log_prob, is_greedy
        cut = int((scores.cut > 0).sum())
        self.cut += cut
        if cut:
            log(f"{cut} of {len(contexts)} contexts were truncated from the left to {self.max_length} tokens.")
        return results

    @property
    def _limit(self) -> str:
        return f"{self.max_length} tokens that the model reads (max_length)"

    def _log_unfit(self, unfit: int, requests: int, reason: str, result: str) -> None:
        if unfit:
            log(f"{unfit} of {requests} requests {reason}. They are not run, and count as {result}.")

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows = []
        for number, request in enumerate(requests):
            windows += [(number, *window) for window in self._windows(request.args[0])]
        scores = self._score_pairs([context for _, context, _ in windows], [continuation for _, _, continuation in windows])
        totals = [0.0] * len(requests)
        for (number, _, _), (log_prob, _) in zip(windows, scores, strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yields (context, continuation) of the windows of a text, each after the soft prompt if the model has one."""
        tokens, prompt = self.tok_encode(text), self.model.soft_prompt
        opening = self._add_prefix(prompt, []) if prompt else []
        start = opening[: len(opening) - len(prompt)]
        if tokens[: len(opening)] == opening:
            tokens = tokens[len(opening) :]
        limit = self.max_length - len(opening)
        if limit < 1:
            raise UserError(f"max_length is {self.max_length}, but {len(opening)} tokens precede each text. Increase it.")
        for window in utils.get_rolling_token_windows(tokens, self.prefix_token_id, limit, context_len=1):
            context, continuation = utils.make_disjoint_window(window)
            yield [*opening, *(context[len(start) :] if context[: len(start)] == start else context)], continuation

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            gen_kwargs = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            # The last generated token is not read, but lm-eval counts it.
            limit = self.max_length if self.has_encoder else self.max_length - 1
            if gen_kwargs["max_gen_toks"] > (limit if not self.has_encoder else self.model.max_positions or math.inf):
                reason = f"ask for {gen_kwargs['max_gen_toks']} tokens (max_gen_toks), which leave no room in the {self._limit}"
                self._log_unfit(len(numbers), len(requests), reason, "an empty text")
                continue
            prompts = {
                n: [*self.tok_encode(requests[n].args[0]), *self._context_suffix] or self._empty_context for n in numbers
            }
            numbers = [number for number in numbers if prompts[number][0] >= 0]
            self._log_unfit(len(prompts) - len(numbers), len(requests), _UNREADABLE, "an empty text")
            completions = self.model.generate(
                [prompts[number] for number in numbers],
                add_start=False,
                max_tokens=gen_kwargs["max_gen_toks"],
                temperature=float(gen_kwargs.get("temperature", 0.0)),
                top_k=int(gen_kwargs.get("top_k", 0)),
                top_p=float(gen_kwargs.get("top_p", 1.0)),
                stop=[end for end in gen_kwargs["until"] if end],
                max_length=limit,
                batch_size=self.batch_size,
            )
            for number, samples in zip(numbers, completions, strict=True):
                texts[number] = samples[0]
                self.cache_hook.add_partial("generate_until", requests[number].args, samples[0])
        return texts


def run_harness(
    model,
    tasks: Sequence[str],
    *,
    include_paths: Sequence[str],
    limit: float | None,
    data: Sequence[str] = (),
    name_prefix: str = "",
    **options,
) -> dict:
    """Returns lm-eval's results of these tasks.

    Args:
      model: a `HarnessModel`.
      tasks: names, files or folders, as lm-eval takes them.
      include_paths: folders of further task files.
      limit: number of examples of each task, or a share below 1. None = all.
      data: local data of tasks in place of the hub's, see `write_task_files`.
      name_prefix: prefix of task names that `data` may leave out.
      options: further arguments of `lm_eval.simple_evaluate`.

    Raises:
      UserError: for a task that lm-eval does not find.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError("--tasks is empty. Name at least one task.")
    if limit is not None and limit <= 0:
        raise UserError(f"--limit is {limit:g}. It must be a number of examples, or a share below 1.")
    folders = list(include_paths)
    manager = TaskManager(include_path=folders)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f'lm-eval has no task "{unknown[0]}". Name one of its tasks, or pass --include_path with the folder of your '
            ".yaml files."
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            if data:
                write_task_files(folder, manager.task_index, tasks, data, name_prefix)
                manager = TaskManager(include_path=[*folders, folder])
            return lm_eval.simple_evaluate(model=model, tasks=list(tasks), limit=limit, task_manager=manager, **options)
    except ConnectionError as error:
        raise UserError(
            f"The data of these tasks cannot be downloaded: {error}. Tasks with local data (--data) need no network."
        ) from error


def add_random_baselines(results: dict, samples: Mapping[str, Sequence[Mapping]]) -> None:
    """Adds to the accuracies in `results` the expected accuracy of guessing, and its mean to those of groups."""
    baselines = {}
    for task, rows in samples.items():
        config = results["configs"][task]
        if "acc,none" in results["results"][task] and rows:
            is_choice = config.get("output_type") == "multiple_choice" and config.get("doc_to_target") != []
            baselines[task] = results["results"][task]["random_baseline,none"] = random_baseline(rows, is_choice)
    for group, members in results.get("group_subtasks", {}).items():
        if members and all(member in baselines for member in members):
            baseline = statistics.fmean(baselines[member] for member in members)
            for scores in (results["results"], results.get("groups", {})):
                if group in scores:
                    scores[group]["random_baseline,none"] = baseline


def ranking_report(model: HarnessModel, samples: Mapping[str, Sequence[Mapping]], configs: Mapping[str, Mapping]) -> dict:
    """Returns the `accuracy.report` of lm-eval's multiple-choice tasks. Each is a data set with one prompt.

    Args:
      model: the model that was evaluated.
      samples, configs: parts of lm-eval's results, by task.
    """
    questions: list[Question] = []
    answers: list[Answer] = []
    for task, rows in samples.items():
        if configs[task].get("output_type") != "multiple_choice":
            continue
        delimiter = configs[task].get("target_delimiter", " ")
        for row in (row for row in rows if row["filter"] == rows[0]["filter"]):
            contexts, continuations = zip(*row["arguments"], strict=True)
            texts = [text.removeprefix(delimiter) for text in continuations]
            # If the choices are the contexts, lm-eval divides by their lengths.
            choices = texts if len(set(continuations)) > 1 else list(contexts)
            labels = _labels(row["target"], choices)
            if not labels:
                continue
            log_probs = [float(log_prob) for log_prob, _ in row["filtered_resps"]]
            tokens = [len(model._encode_pair(*pair)[1]) for pair in row["arguments"]]
            questions.append(Question(tuple(contexts), tuple(choices), labels, dataset=task))
            answers.append(make_answer(log_probs, tokens, [len(choice) for choice in choices]))
    return accuracy.report(questions, answers) if questions else {}


def _labels(target: object, choices: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of the right choices, empty if lm-eval counts none as right."""
    targets = target if isinstance(target, list) else [target]
    numbers = [choices.index(t) if isinstance(t, str) and t in choices else t for t in targets]
    labels = [int(n) for n in numbers if isinstance(n, int) or (isinstance(n, str) and n.isdigit())]
    return tuple(n for n in labels if 0 <= n < len(choices))
