"""Denoising objectives (Raffel et al. 2020, section 3.3) and the lengths at which they fill a row.

Nothing here imports TensorFlow before the SeqIO preprocessors are asked for.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import UserError, nearest
from t5x_lab.data.objective import Objective, Tokens

_RARELY = 1e-3  # share of examples that may be cut, where lengths are random

# What becomes of a sequence with noise in it, and what it costs: tokens for each text token, noise token, span of noise.
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
    """Text with noise is read, and the text or the noise is written (Raffel et al., section 3.3; Table 3).

    Attributes:
      noise_density: share of tokens that are noise.
      mean_noise_span_length: a fixed share of noise in a fixed number of spans, of this mean length; None = each token is
        noise or not, independently of the others.
      inputs: one of `INPUTS`: noise replaced by one sentinel a span or a token, by random tokens (10 %) or a sentinel (90 %),
        left out, or put in another order; or one's own function, with the arguments of the `t5` library's (tokens,
        noise_mask, vocabulary, seeds), that makes at most as many tokens.
      targets: one of `TARGETS`: the whole text, spans of noise after the sentinels that stand for them, or noise alone; or a
        function.
      merge_documents: whether an example may hold parts of several documents, which leaves less padding.
      mode: UL2's mode token before the inputs: the sentinel so far from the last; None = none.
    """

    noise_density: float = 0.15
    mean_noise_span_length: float | None = None
    inputs: Any = "sentinel_per_span"
    targets: Any = "noise_by_sentinel"
    merge_documents: bool = True
    mode: int | None = None

    def __post_init__(self):
        check_types(self)
        positive(self, "mean_noise_span_length")
        in_range(self, "mode", 0, 3)
        spans = self.mean_noise_span_length
        if spans is not None and (spans < 1 or self.noise_density / spans > 1 - self.noise_density):
            raise UserError(
                f"Denoising with noise_density {self.noise_density} in spans of mean length {spans} leaves less than one token "
                "of text for each span. Give a mean length of at least 1, less noise, or longer spans."
            )
        if not 0 < self.noise_density <= 1:
            raise UserError(f"Denoising.noise_density is {self.noise_density}; it must be above 0 and at most 1.")
        for field, known in (("inputs", INPUTS), ("targets", TARGETS)):
            value = getattr(self, field)
            if not callable(value) and value not in known:
                raise UserError(
                    f"Denoising.{field} is {value!r}.{nearest(str(value), known)} Choose one of {', '.join(known)}, or give "
                    "a function of (tokens, noise_mask, vocabulary, seeds)."
                )

    def complete(self, lengths, architecture, sentinels):
        if self.inputs in ("sentinel_per_token", "random_or_sentinel") and self.sentinels_left(sentinels) < 1:
            raise UserError(f"{self.inputs} needs a sentinel, and the vocabulary has none left. Give it more extra_ids.")
        if "inputs" in lengths and "targets" not in lengths:
            n = self.text_tokens(lengths["inputs"], None, sentinels)
            lengths = {**lengths, "targets": self._most(n, "targets") + 1}
        complete = super().complete(lengths, architecture, sentinels)
        n = self.text_tokens(complete["inputs"], None, sentinels)
        if self._most(n, "targets") + 1 > complete["targets"]:
            raise UserError(
                f"Inputs of {complete['inputs']} tokens with {self.noise_density:.0%} noise make targets of up to "
                f"{self._most(n, 'targets') + 1} tokens; TASK_FEATURE_LENGTHS gives {complete['targets']}. Give at least that, "
                'or leave "targets" out and have it computed.'
            )
        return complete

    def tokens(self, lengths, architecture, sentinels):
        n = self.text_tokens(lengths["inputs"], lengths["targets"], sentinels)
        inputs, targets = (self._expected(n, side) + 1 for side in ("inputs", "targets"))
        return Tokens(inputs + self._mode_tokens + targets, targets, n)

    def preprocessors(self):
        from t5x_lab.data import preprocessors

        sizes = lambda lengths, sentinels: [self.text_tokens(lengths["inputs"], lengths.get("targets"), sentinels)]
        return [preprocessors.chunks(sizes, merge_documents=self.merge_documents), preprocessors.denoise(self, [self])]

    def share_of_inputs(self, lengths, sentinels):
        n = self.text_tokens(lengths["inputs"], lengths["targets"], sentinels)
        return (self._most(n, "inputs") + 1 + self._mode_tokens) / lengths["inputs"]

    def text_tokens(self, inputs: int, targets: int | None, sentinels: int) -> int:
        """Tokens of text in an example: the most whose inputs, targets and sentinels fit.

        Args:
          inputs, targets: lengths; without targets' they may take what they need, but with half noise or less no more than
            the inputs do.
          sentinels: how many the vocabulary has.

        Raises:
          UserError: when not even two tokens fit.
        """
        targets = (inputs if self.noise_density <= 0.5 else None) if targets is None else targets
        n = self._text_tokens(inputs - 1 - self._mode_tokens, None if targets is None else targets - 1, sentinels)
        if n < 2:
            raise UserError(
                f"With inputs of {inputs} tokens and {sentinels} sentinels an example has no room for {self.noise_density:.0%} "
                "noise. Give longer TASK_FEATURE_LENGTHS, or a vocabulary with more extra_ids."
            )
        return n

    @functools.lru_cache(maxsize=256)  # noqa: B019  (objectives are few and small)
    def _text_tokens(self, inputs: int, targets: int | None, sentinels: int) -> int:
        limits = {"inputs": inputs, "sentinels": self.sentinels_left(sentinels)}
        if targets is not None:
            limits["targets"] = targets
        if self.mean_noise_span_length is None:
            n = 64 * inputs  # where noise costs nothing, nothing else bounds the text
            for side, limit in limits.items():
                n = _iid_fit(self.noise_density, self._costs(side), limit, n)
            return n
        is_too_long = lambda n: any(self._most(n, side) > limit for side, limit in limits.items())
        most = 2
        while not is_too_long(most):
            most *= 2
        return 1 + bisect.bisect_left(range(2, most), True, key=is_too_long)

    @property
    def _mode_tokens(self) -> int:
        return 0 if self.mode is None else 1

    def sentinels_left(self, sentinels: int) -> int:
        """Without the modes' own: UL2 has three."""
        return sentinels - (0 if self.mode is None else 3)

    def _costs(self, side: str) -> tuple[int, int, int]:
        if side == "sentinels":
            one_each = self.inputs == "sentinel_per_span" or self.targets == "noise_by_sentinel"
            return (0, 0, 1) if one_each else (0, 0, 0)
        known, view = (INPUTS, self.inputs) if side == "inputs" else (TARGETS, self.targets)
        return (1, 1, 0) if callable(view) else known[view]

    def _most(self, n: int, side: str) -> int:
        """The length of one side, without end token, that examples of n tokens of text (almost) never exceed."""
        if self.mean_noise_span_length is None:
            return _iid_most(self.noise_density, self._costs(side), n)
        return round(self._expected(n, side))

    def _expected(self, n: int, side: str) -> float:
        """The mean length of one side, without end token; the length, where the number of spans is fixed."""
        text, noise, span = self._costs(side)
        if self.mean_noise_span_length is None:
            p = self.noise_density
            spans = (p if side == "inputs" else 1 - p) + (n - 1) * p * (
                1 - p
            )  # targets have a sentinel for each gap in the noise
            return text * n * (1 - p) + noise * n * p + span * spans
        num_noise, num_spans = self.noise(n)
        return text * (n - num_noise) + noise * num_noise + span * num_spans

    def noise(self, n: int) -> tuple[int, int]:
        """(tokens, spans) of noise in n tokens, where their number is fixed; rounded as TensorFlow does, in float32."""
        num_noise = int(np.clip(np.round(np.float32(n) * np.float32(self.noise_density)), 1, n - 1))
        return num_noise, max(1, int(np.round(np.float32(num_noise) / np.float32(self.mean_noise_span_length))))


@functools.lru_cache(maxsize=256)
def _iid_fit(density: float, costs: tuple[int, int, int], limit: int, most: int) -> int:
    """The most tokens, up to `most`, whose length exceeds `limit` in at most `_RARELY` of all examples."""
    if not any(costs):
        return most
    chances = itertools.islice(_iid_lengths(density, costs, limit), most)
    return sum(1 for _ in itertools.takewhile(lambda ends: ends.sum() >= 1 - _RARELY, chances))


@functools.lru_cache(maxsize=256)
def _iid_most(density: float, costs: tuple[int, int, int], n: int) -> int:
    """The length that at most `_RARELY` of all examples of n tokens exceed."""
    mean = n * (costs[0] * (1 - density) + costs[1] * density + costs[2] * density * (1 - density))
    limit = round(mean + 10 * math.sqrt(n)) + 10  # many deviations away
    ends = next(itertools.islice(_iid_lengths(density, costs, limit), n - 1, None))
    return int(np.searchsorted(np.cumsum(ends), 1 - _RARELY))


def _iid_lengths(density: float, costs: tuple[int, int, int], limit: int) -> Iterator[np.ndarray]:
    """For n = 1, 2, … tokens the chances of each length up to `limit`, when each token is noise on its own.

    A chain of two states, text and noise, one token at a time. The targets' sentinels stand for gaps in the noise instead of
    spans of it, of which there may be one more: so one is paid at the start.
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
    """A mixture of denoising objectives, such as UL2's, drawn anew for each example.

    Attributes:
      mixture: (objective, rate) of each.
    """

    mixture: tuple[tuple[Denoising, float], ...]

    def complete(self, lengths, architecture, sentinels):
        each = [objective.complete(lengths, architecture, sentinels) for objective, _ in self.mixture]
        return {name: max(complete[name] for complete in each) for name in each[0]}

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
        from t5x_lab.data import preprocessors

        objectives, rates = zip(*self.mixture, strict=True)

        def sizes(lengths, sentinels):
            targets = self.complete(lengths, "encoder_decoder", sentinels)["targets"]
            return [objective.text_tokens(lengths["inputs"], targets, sentinels) for objective in objectives]

        return [preprocessors.chunks(sizes, rates), preprocessors.denoise(self, objectives)]
