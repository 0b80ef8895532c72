"""A model for lm-eval (EleutherAI), which `t5x_lab harness` runs.

What a context is depends on the architecture: the encoder's input, or the decoder's prefix, which a prefix decoder reads both
ways. As in lm-eval, context and continuation of an encoder-decoder are tokenised separately, those of a decoder as one text.
"""

from collections.abc import Sequence

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from t5x_lab.config.errors import UserError
from t5x_lab.observe.console import say


class HarnessModel(TemplateLM):
    """lm-eval's questions put to a t5x_lab model.

    Args:
      model: see `t5x_lab.evaluation`.
      batch_size: texts at a time.
      max_length: tokens that an encoder reads, or a decoder with those it writes. Longer contexts are cut from the left, and
        counted. By default the positions that the model has learned, or 2048.
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
        self.max_length = max_length or model.max_positions or 2048
        self.max_gen_toks = max_gen_toks
        self.cut = 0

    @property
    def tokenizer_name(self) -> str:
        return str(self.vocabulary)

    @property
    def eot_token_id(self) -> int:
        return self.vocabulary.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is made of: for a decoder its start token, which `Run.scores` puts before all texts."""
        return self.vocabulary.eos_id if self.has_encoder else 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused) -> list[int]:
        ends = self.has_encoder and self.model.input_eos and add_special_tokens is not False
        return list(self.vocabulary.encode(string)) + [self.eot_token_id] * ends

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **unused) -> list[tuple[float, bool]]:
        # A decoder that was trained with an end token after its inputs finds one there.
        ends = [self.eot_token_id] * (self.model.input_eos and not self.has_encoder)
        contexts = [[*context, *ends] if context != [0] else [] for _, context, _ in requests]
        scores = self._scores(contexts, [continuation for _, _, continuation in requests])
        found = list(zip(scores.log_prob.tolist(), scores.is_greedy.tolist(), strict=True))
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def _scores(self, contexts: Sequence[list[int]], continuations: Sequence[list[int]]):
        scores = self.model.scores(contexts, continuations, max_length=self.max_length, batch_size=self.batch_size)
        self.cut += int((scores.cut > 0).sum())
        if (scores.cut > 0).any():
            say(
                f"{int((scores.cut > 0).sum())} of {len(contexts)} contexts were cut from the left to {self.max_length} tokens."
            )
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows = []
        # A decoder reads its start token besides the window's context.
        most = self.max_length if self.has_encoder else self.max_length - 1
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            found = utils.get_rolling_token_windows(tokens, self.prefix_token_id, most, context_len=1)
            windows += [(number, *utils.make_disjoint_window(window)) for window in found]
        scores = self._scores([context for _, context, _ in windows], [continuation for _, _, continuation in windows])
        totals = [0.0] * len(requests)
        for (number, _, _), log_prob in zip(windows, scores.log_prob.tolist(), strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            wishes = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            written = self.model.generate(
                [requests[number].args[0] for number in numbers],
                max_tokens=wishes["max_gen_toks"],
                temperature=float(wishes.get("temperature", 0.0)),
                top_k=int(wishes.get("top_k", 0)),
                top_p=float(wishes.get("top_p", 1.0)),
                stop=[end for end in wishes["until"] if end],
                max_length=self.max_length,
                batch_size=self.batch_size,
            )
            for number, samples in zip(numbers, written, strict=True):
                texts[number] = samples[0]
                self.cache_hook.add_partial("generate_until", requests[number].args, samples[0])
        return texts


def run_harness(model, tasks: Sequence[str], *, include_path: str | None, limit: float | None, **options) -> dict:
    """lm-eval's results of these tasks.

    Args:
      model: a `HarnessModel`.
      tasks: names, files or folders, as lm-eval takes them.
      include_path: a folder of further task files.
      limit: the first N examples of each task, or a share below 1; None = all.
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
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f'lm-eval knows no task "{unknown[0]}". Name one of its own, or give --include_path, where your .yaml files are.'
        )
    try:
        return lm_eval.simple_evaluate(model=model, tasks=list(tasks), limit=limit, task_manager=manager, **options)
    except ConnectionError as error:
        raise UserError(
            f"The data of these tasks cannot be reached: {error}. Tasks whose data are local files need no network."
        ) from error
