"""Denoising objectives (Raffel et al. 2020, section 3.3), and the lengths at which their examples fill a row."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.data.objectives.objective import Objective, Tokens

_MAX_TRUNCATED = 1e-3  # share of examples that may be truncated if lengths are random

# Views of a corrupted sequence and their lengths: tokens per text token, per noise token, per noise span.
INPUTS = {
    "sentinel_per_span": (1, 0, 1),
    "sentinel_per_token": (1, 1, 0),
    "random_or_sentinel": (1, 1, 0),
    "without_noise": (1, 0, 0),
    "permuted": (1, 1, 0),
}
TARGETS = {"whole": (1, 1, 0), "noise_by_sentinel": (0, 1, 1), "noise_alone": (0, 1, 0)}


@dataclasses.dataclass(frozen=True)
class Denoising(Objective):
    """Denoising: inputs are corrupted text, targets are the text or the noise (Raffel et al., section 3.3; Table 3).

    Attributes:
      noise_density: share of tokens that are noise.
      mean_noise_span_length: mean length of noise spans. Their number is then fixed. None = each token is noise independently.
      inputs: one of `INPUTS`: noise is replaced by one sentinel per span or per token, by random tokens (10 %) or a sentinel
        (90 %), dropped, or permuted. Or a function with the arguments of the `t5` library's (tokens, noise_mask, vocabulary,
        seeds), which returns at most as many tokens.
      targets: one of `TARGETS`: the whole text, noise spans after their sentinels, or the noise alone. Or a function.
      merge_documents: whether an example may hold parts of several documents, which leaves less padding.
      mode: number of UL2's mode token before the inputs, counted from the last sentinel. None = no mode token.
    """

    noise_density: float = 0.15
    mean_noise_span_length: float | None = None
    inputs: Any = "sentinel_per_span"
    targets: Any = "noise_by_sentinel"
    merge_documents: bool = True
    mode: int | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, "mean_noise_span_length")
        check_range(self, "mode", 0, 3)
        spans = self.mean_noise_span_length
        if spans is not None and (spans < 1 or self.noise_density / spans > 1 - self.noise_density):
            raise UserError(
                f"Denoising with noise_density {self.noise_density} in spans of mean length {spans} has less than one token "
                "of text per span. Use a mean length of at least 1, less noise, or longer spans."
            )
        if not 0 < self.noise_density <= 1:
            raise UserError(f"Denoising.noise_density is {self.noise_density}. It must be above 0 and at most 1.")
        for field, views in (("inputs", INPUTS), ("targets", TARGETS)):
            value = getattr(self, field)
            if not callable(value) and value not in views:
                raise UserError(
                    f"Denoising.{field} is {value!r}.{did_you_mean(str(value), views)} Choose one of {', '.join(views)}, or a "
                    "function of (tokens, noise_mask, vocabulary, seeds)."
                )

    def complete(self, lengths, architecture, sentinels):
        if self.inputs in ("sentinel_per_token", "random_or_sentinel") and self.available_sentinels(sentinels) < 1:
            raise UserError(f"{self.inputs} needs a sentinel, but the vocabulary has none available. Increase its extra_ids.")
        if "inputs" in lengths and "targets" not in lengths:
            n = self.text_tokens(lengths["inputs"], None, sentinels)
            lengths = {**lengths, "targets": self._max_length(n, "targets") + 1}
        complete = super().complete(lengths, architecture, sentinels)
        n = self.text_tokens(complete["inputs"], None, sentinels)
        if self._max_length(n, "targets") + 1 > complete["targets"]:
            raise UserError(
                f"Inputs of {complete['inputs']} tokens with {self.noise_density:.0%} noise make targets of up to "
                f"{self._max_length(n, 'targets') + 1} tokens, but TASK_FEATURE_LENGTHS has {complete['targets']}. Increase "
                "it, "
                'or remove "targets", which is then computed.'
            )
        return complete

    def tokens(self, lengths, architecture, sentinels):
        n = self.text_tokens(lengths["inputs"], lengths["targets"], sentinels)
        inputs, targets = (self._expected(n, side) + 1 for side in ("inputs", "targets"))
        return Tokens(inputs + self._mode_tokens + targets, targets, n)

    def preprocessors(self):
        from t5x_lab.data.objectives import preprocessors  # needs TensorFlow

        sizes = lambda lengths, sentinels: [self.text_tokens(lengths["inputs"], lengths.get("targets"), sentinels)]
        return [preprocessors.chunk(sizes, merge_documents=self.merge_documents), preprocessors.denoise(self, [self])]

    def share_of_inputs(self, lengths, sentinels):
        n = self.text_tokens(lengths["inputs"], lengths["targets"], sentinels)
        return (self._max_length(n, "inputs") + 1 + self._mode_tokens) / lengths["inputs"]

    def text_tokens(self, inputs: int, targets: int | None, sentinels: int) -> int:
        """Returns the maximum tokens of text whose inputs, targets and sentinels fit.

        Args:
          inputs, targets: lengths. If `targets` is None, targets are unlimited, or with half noise or less limited to the
            inputs' length.
          sentinels: number of sentinels of the vocabulary.

        Raises:
          UserError: if not even two tokens fit.
        """
        targets = (inputs if self.noise_density <= 0.5 else None) if targets is None else targets
        n = self._text_tokens(inputs - 1 - self._mode_tokens, None if targets is None else targets - 1, sentinels)
        if n < 2:
            raise UserError(
                f"Inputs of {inputs} tokens and {sentinels} sentinels have no room for {self.noise_density:.0%} noise. Use "
                "longer TASK_FEATURE_LENGTHS, or a vocabulary with more extra_ids."
            )
        return n

    @functools.lru_cache(maxsize=256)  # noqa: B019  (objectives are few and small)
    def _text_tokens(self, inputs: int, targets: int | None, sentinels: int) -> int:
        limits = {"inputs": inputs, "sentinels": self.available_sentinels(sentinels)}
        if targets is not None:
            limits["targets"] = targets
        if self.mean_noise_span_length is None:
            n = 64 * inputs  # a bound if noise has no length in any view
            for side, limit in limits.items():
                n = _iid_fit(self.noise_density, self._costs(side), limit, n)
            return n
        is_too_long = lambda n: any(self._max_length(n, side) > limit for side, limit in limits.items())
        most = 2
        while not is_too_long(most):
            most *= 2
        return 1 + bisect.bisect_left(range(2, most), True, key=is_too_long)

    @property
    def _mode_tokens(self) -> int:
        return 0 if self.mode is None else 1

    def available_sentinels(self, sentinels: int) -> int:
        """Returns the number of sentinels for noise. With mode tokens, UL2's three are reserved."""
        return sentinels - (0 if self.mode is None else 3)

    def _costs(self, side: str) -> tuple[int, int, int]:
        if side == "sentinels":
            one_each = self.inputs == "sentinel_per_span" or self.targets == "noise_by_sentinel"
            return (0, 0, 1) if one_each else (0, 0, 0)
        costs, view = (INPUTS, self.inputs) if side == "inputs" else (TARGETS, self.targets)
        return (1, 1, 0) if callable(view) else costs[view]

    def _max_length(self, n: int, side: str) -> int:
        """Returns the length of inputs or targets, without EOS, that examples of n tokens of text (almost) never exceed."""
        if self.mean_noise_span_length is None:
            return _iid_max_length(self.noise_density, self._costs(side), n)
        return round(self._expected(n, side))

    def _expected(self, n: int, side: str) -> float:
        """Returns the mean length of inputs or targets, without EOS. It is exact if the number of spans is fixed."""
        text, noise, span = self._costs(side)
        if self.mean_noise_span_length is None:
            p = self.noise_density
            # Targets have a sentinel for each gap in the noise.
            spans = (p if side == "inputs" else 1 - p) + (n - 1) * p * (1 - p)
            return text * n * (1 - p) + noise * n * p + span * spans
        num_noise, num_spans = self.noise(n)
        return text * (n - num_noise) + noise * num_noise + span * num_spans

    def noise(self, n: int) -> tuple[int, int]:
        """Returns (tokens, spans) of noise in n tokens if their number is fixed, rounded in float32 as TensorFlow does."""
        num_noise = int(np.clip(np.round(np.float32(n) * np.float32(self.noise_density)), 1, n - 1))
        return num_noise, max(1, int(np.round(np.float32(num_noise) / np.float32(self.mean_noise_span_length))))


@functools.lru_cache(maxsize=256)
def _iid_fit(density: float, costs: tuple[int, int, int], limit: int, max_tokens: int) -> int:
    """Returns the maximum tokens whose length exceeds `limit` in at most `_MAX_TRUNCATED` of the examples."""
    if not any(costs):
        return max_tokens
    chances = itertools.islice(_iid_lengths(density, costs, limit), max_tokens)
    return sum(1 for _ in itertools.takewhile(lambda probabilities: probabilities.sum() >= 1 - _MAX_TRUNCATED, chances))


@functools.lru_cache(maxsize=256)
def _iid_max_length(density: float, costs: tuple[int, int, int], n: int) -> int:
    """Returns the length that at most `_MAX_TRUNCATED` of the examples of n tokens exceed."""
    mean = n * (costs[0] * (1 - density) + costs[1] * density + costs[2] * density * (1 - density))
    limit = round(mean + 10 * math.sqrt(n)) + 10  # many standard deviations above the mean
    probabilities = next(itertools.islice(_iid_lengths(density, costs, limit), n - 1, None))
    return int(np.searchsorted(np.cumsum(probabilities), 1 - _MAX_TRUNCATED))


def _iid_lengths(density: float, costs: tuple[int, int, int], limit: int) -> Iterator[np.ndarray]:
    """Yields for n = 1, 2, … tokens the probability of each length up to `limit`, if tokens are noise independently.

    A Markov chain of two states, text and noise. Sentinels of targets stand for gaps in the noise, of which there may be one
    more than spans, so that one is counted at the start.
    """
    text, noise, span = costs
    shifted = lambda chances, by: np.concatenate([np.zeros(by), chances])[: limit + 1]
    in_text, in_noise = np.zeros((2, limit + 1))
    in_text[min(span, limit)] = 1.0
    while True:
        in_text, in_noise = (
            shifted(in_text + in_noise, text) * (1 - density),
            (shifted(in_text, noise + span) + shifted(in_noise, noise)) * density,
        )
        yield in_text + in_noise


@dataclasses.dataclass(frozen=True)
class Denoisers(Objective):
    """Mixture of denoising objectives such as UL2. One is sampled for each example.

    Attributes:
      mixture: (objective, rate) pairs.
    """

    mixture: tuple[tuple[Denoising, float], ...]

    def complete(self, lengths, architecture, sentinels):
        completed = [objective.complete(lengths, architecture, sentinels) for objective, _ in self.mixture]
        return {name: max(lengths[name] for lengths in completed) for name in completed[0]}

    def tokens(self, lengths, architecture, sentinels):
        total = sum(rate for _, rate in self.mixture)
        means = [0.0, 0.0, 0.0]
        for objective, rate in self.mixture:
            tokens = objective.tokens(lengths, architecture, sentinels)
            means = [m + t * rate / total for m, t in zip(means, dataclasses.astuple(tokens), strict=True)]
        return Tokens(*means)

    def share_of_inputs(self, lengths, sentinels):
        return min(objective.share_of_inputs(lengths, sentinels) for objective, _ in self.mixture)

    def preprocessors(self):
        from t5x_lab.data.objectives import preprocessors  # needs TensorFlow

        objectives, rates = zip(*self.mixture, strict=True)

        def sizes(lengths, sentinels):
            targets = self.complete(lengths, "encoder_decoder", sentinels)["targets"]
            return [objective.text_tokens(lengths["inputs"], targets, sentinels) for objective in objectives]

        return [preprocessors.chunk(sizes, rates), preprocessors.denoise(self, objectives)]
