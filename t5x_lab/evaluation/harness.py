"""A model for lm-eval (EleutherAI), which `t5x_lab harness` runs.

What a context is depends on the architecture: the encoder's input, or the decoder's prefix, which a prefix decoder reads both
ways. As in lm-eval, context and continuation of an encoder-decoder are tokenised separately, those of a decoder as one text.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from t5x_lab.config.errors import UserError
from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer
from t5x_lab.evaluation import accuracy, rank
from t5x_lab.evaluation.eai_eval.baseline import random_baseline
from t5x_lab.evaluation.harness_data import OWN_TASKS, write_task_files
from t5x_lab.observe.console import say

_UNREADABLE = "begin with nothing, which a model without a start or an end token cannot read"


class HarnessModel(TemplateLM):
    """lm-eval's questions put to a t5x_lab model.

    Args:
      model: see `t5x_lab.evaluation`.
      batch_size: texts at a time, fewer of long ones.
      max_length: tokens that an encoder reads, or a decoder with those it writes. Longer contexts are cut from the left, and
        counted. By default those that it was trained at, where that is known, or 2048.
      max_gen_toks: most tokens to write where a task does not say.
    """

    def __init__(
        self,
        model,
        batch_size: int | str = 32,
        max_length: int | None = None,
        max_gen_toks: int = 256,
    ):
        super().__init__()
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
        """What an empty context is made of: a decoder's start token, or one that its tokenizer has and leaves out of texts."""
        start = None if self.has_encoder else self.model.special_tokens.start
        own = self.vocabulary.bos_id if isinstance(self.vocabulary, HuggingFaceTokenizer) else None
        return next(i for i in (start, own, self.eot_token_id) if i is not None)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused) -> list[int]:
        """As lm-eval's own models: ids with what the model reads before or after a text."""
        ids = list(self.vocabulary.encode(string))
        if add_special_tokens is False:
            return ids
        before, after = self.model.around_inputs
        return self._behind(before, [*ids, *after] if self.has_encoder else ids)

    def _behind(self, before: Sequence[int], ids: list[int]) -> list[int]:
        """Ids behind what the model reads first, where they do not say it themselves."""
        if self.has_encoder:
            return [*before, *ids]
        start = self.model.special_tokens.start
        return ids if start in ids[:1] else [*(() if start is None else (start,)), *before, *ids]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **unused) -> list[tuple[float, bool]]:
        ends = self._behind_contexts
        contexts = [[*context, *ends] if context != [self.prefix_token_id] else context for _, context, _ in requests]
        contexts = [context or self._blank for context in contexts]
        found = self._scores(contexts, [continuation for _, _, continuation in requests])
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    @property
    def _behind_contexts(self) -> list[int]:
        """A decoder that was trained with an end token after its inputs finds one there."""
        return [] if self.has_encoder else self.model.around_inputs[1]

    @property
    def _blank(self) -> list[int]:
        """What a context without a token, such as a space, is read as: an encoder reads at least its end token."""
        return [self.prefix_token_id]

    def _scores(self, contexts: Sequence[list[int]], continuations: Sequence[list[int]]) -> list[tuple[float, bool]]:
        """(log-probability, whether it is what the model would write) of each continuation; (-inf, False) if it has none."""
        found = [(-math.inf, False)] * len(contexts)
        begun = [i for i, context in enumerate(contexts) if context[0] >= 0]
        self._say_unfit(len(contexts) - len(begun), len(contexts), _UNREADABLE, "-inf")
        fitting = [i for i in begun if len(continuations[i]) <= self.max_length]
        longest = max(map(len, continuations), default=0)
        too_long = f"have continuations of up to {longest} tokens, beyond the {self._limit}"
        self._say_unfit(len(begun) - len(fitting), len(contexts), too_long, "-inf")
        options = dict(max_length=self.max_length, batch_size=self.batch_size, add_start=False)
        scores = self.model.scores([contexts[i] for i in fitting], [continuations[i] for i in fitting], **options)
        for i, log_prob, is_greedy in zip(fitting, scores.log_prob.tolist(), scores.is_greedy.tolist(), strict=True):
            found[i] = log_prob, is_greedy
        cut = int((scores.cut > 0).sum())
        self.cut += cut
        if cut:
            say(f"{cut} of {len(contexts)} contexts were cut from the left to {self.max_length} tokens.")
        return found

    @property
    def _limit(self) -> str:
        return f"{self.max_length} tokens that the model reads (max_length)"

    def _say_unfit(self, unfit: int, requests: int, what: str, counted: str) -> None:
        if unfit:
            say(f"{unfit} of {requests} requests {what}. They are not answered, and count as {counted}.")

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows = []
        for number, request in enumerate(requests):
            windows += [(number, *window) for window in self._windows(request.args[0])]
        scores = self._scores([context for _, context, _ in windows], [continuation for _, _, continuation in windows])
        totals = [0.0] * len(requests)
        for (number, _, _), (log_prob, _) in zip(windows, scores, strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """(context, continuation) of the parts of a text, each behind the soft prompt of a model that has one."""
        tokens, before = self.tok_encode(text), self.model.soft_prompt
        opening = self._behind(before, []) if before else []
        start = opening[: len(opening) - len(before)]
        if tokens[: len(opening)] == opening:
            tokens = tokens[len(opening) :]
        most = self.max_length - len(opening)
        if most < 1:
            raise UserError(f"max_length is {self.max_length}; {len(opening)} tokens stand before each text. Give it more.")
        for window in utils.get_rolling_token_windows(tokens, self.prefix_token_id, most, context_len=1):
            context, continuation = utils.make_disjoint_window(window)
            yield [*opening, *(context[len(start) :] if context[: len(start)] == start else context)], continuation

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            wishes = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            # The last token written is not read, but lm-eval counts it.
            most = self.max_length if self.has_encoder else self.max_length - 1
            if wishes["max_gen_toks"] > (most if not self.has_encoder else self.model.max_positions or math.inf):
                wished = f"ask for {wishes['max_gen_toks']} tokens (max_gen_toks), which leave no room in the {self._limit}"
                self._say_unfit(len(numbers), len(requests), wished, "an empty text")
                continue
            prompts = {n: [*self.tok_encode(requests[n].args[0]), *self._behind_contexts] or self._blank for n in numbers}
            numbers = [number for number in numbers if prompts[number][0] >= 0]
            self._say_unfit(len(prompts) - len(numbers), len(requests), _UNREADABLE, "an empty text")
            written = self.model.generate(
                [prompts[number] for number in numbers],
                add_start=False,
                max_tokens=wishes["max_gen_toks"],
                temperature=float(wishes.get("temperature", 0.0)),
                top_k=int(wishes.get("top_k", 0)),
                top_p=float(wishes.get("top_p", 1.0)),
                stop=[end for end in wishes["until"] if end],
                max_length=most,
                batch_size=self.batch_size,
            )
            for number, samples in zip(numbers, written, strict=True):
                texts[number] = samples[0]
                self.cache_hook.add_partial("generate_until", requests[number].args, samples[0])
        return texts


def run_harness(
    model, tasks: Sequence[str], *, include_path: str | None, limit: float | None, data: Sequence[str] = (), **options
) -> dict:
    """lm-eval's results of these tasks.

    Args:
      model: a `HarnessModel`.
      tasks: names, files or folders, as lm-eval takes them.
      include_path: a folder of further task files.
      limit: the first N examples of each task, or a share below 1; None = all.
      data: where tasks find their data instead of on the hub, see `write_task_files`.
      options: further arguments of `lm_eval.simple_evaluate`.

    Raises:
      UserError: for a task that lm-eval does not find.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError("--tasks names no task.")
    if limit is not None and limit <= 0:
        raise UserError(f"--limit is {limit:g}; give a number of examples, or a share below 1.")
    folders = [OWN_TASKS, *([include_path] if include_path else [])]
    manager = TaskManager(include_path=folders)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f'lm-eval knows no task "{unknown[0]}". Name one of its own, or give --include_path, where your .yaml files are.'
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            if data:
                write_task_files(folder, manager.task_index, tasks, data)
                manager = TaskManager(include_path=[*folders, folder])
            return lm_eval.simple_evaluate(model=model, tasks=list(tasks), limit=limit, task_manager=manager, **options)
    except ConnectionError as error:
        raise UserError(
            f"The data of these tasks cannot be reached: {error}. Tasks whose data are local files need no network."
        ) from error


def add_random_baselines(results: dict, samples: Mapping[str, Sequence[Mapping]]) -> None:
    """Puts beside the accuracies of `results` what guessing scores, and beside those of groups its mean."""
    of_tasks = {}
    for task, rows in samples.items():
        config = results["configs"][task]
        if "acc,none" in results["results"][task] and rows:
            is_choice = config.get("output_type") == "multiple_choice" and config.get("doc_to_target") != []
            of_tasks[task] = results["results"][task]["random_baseline,none"] = random_baseline(rows, is_choice)
    for group, members in results.get("group_subtasks", {}).items():
        if members and all(member in of_tasks for member in members):
            baseline = statistics.fmean(of_tasks[member] for member in members)
            for found in (results["results"], results.get("groups", {})):
                if group in found:
                    found[group]["random_baseline,none"] = baseline


def ranking(model: HarnessModel, samples: Mapping[str, Sequence[Mapping]], configs: Mapping[str, Mapping]) -> dict:
    """`accuracy.report` of what lm-eval has asked in multiple-choice tasks; each is a data set of one prompt.

    Args:
      model: that answered.
      samples, configs: of lm-eval's results, by task.
    """
    asked: list[rank.Question] = []
    found: list[rank.Answer] = []
    for task, rows in samples.items():
        if configs[task].get("output_type") != "multiple_choice":
            continue
        delimiter = configs[task].get("target_delimiter", " ")
        for row in (row for row in rows if row["filter"] == rows[0]["filter"]):
            contexts, continuations = zip(*row["arguments"], strict=True)
            texts = [text.removeprefix(delimiter) for text in continuations]
            # Where the contexts are what is chosen among, lm-eval divides by their lengths.
            choices = texts if len(set(continuations)) > 1 else list(contexts)
            labels = _labels(row["target"], choices)
            if not labels:
                continue
            log_probs = [float(log_prob) for log_prob, _ in row["filtered_resps"]]
            tokens = [len(model._encode_pair(*pair)[1]) for pair in row["arguments"]]
            asked.append(rank.Question(tuple(contexts), tuple(choices), labels, dataset=task))
            found.append(rank.answer(log_probs, tokens, [len(choice) for choice in choices]))
    return accuracy.report(asked, found) if asked else {}


def _labels(target: object, choices: Sequence[str]) -> tuple[int, ...]:
    """Numbers of the right choices, as lm-eval's tasks say them; none where it counts none as right."""
    targets = target if isinstance(target, list) else [target]
    numbers = [choices.index(t) if isinstance(t, str) and t in choices else t for t in targets]
    known = [int(n) for n in numbers if isinstance(n, int) or (isinstance(n, str) and n.isdigit())]
    return tuple(n for n in known if 0 <= n < len(choices))
