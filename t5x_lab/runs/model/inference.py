"""Compiled inference on token ids: sequences are sorted, batched and padded, and results are returned in order.

Sequences are lists of ids without padding. A decoder's prompts include its start token. All processes make the same calls and
get the same results.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.decoding import generation
from t5x_lab.decoding.beam_search import BeamConfig, search
from t5x_lab.decoding.generation import Generated, Sequences, complete_all
from t5x_lab.decoding.sampling import EndIds, SamplingConfig
from t5x_lab.networks.functional import Params
from t5x_lab.networks.network import has_encoder
from t5x_lab.partitioning.waiting import fetch
from t5x_lab.runs.model.length_limits import LengthLimits
from t5x_lab.runs.model.padding import PADDING, Ids, bucket, pad, pad_rows, round_up, scoring_batch
from t5x_lab.runs.model.sharded_model import ShardedModel

MAX_BATCH_TOKENS = 1 << 13  # tokens of a batch on each device that rows are split over


class Inference:
    """Compiled functions of a model. Parameters are arguments.

    Args:
      sharded: model and mesh.
      start: start token of a decoder behind an encoder.
    """

    def __init__(self, sharded: ShardedModel, start: int = 0):
        self._sharded, self._model = sharded, sharded.model
        self.has_encoder = has_encoder(sharded.model.config.network)
        self._ids = {"start": start if self.has_encoder else None, "padding": PADDING}
        self.length_limits = LengthLimits(sharded.model.config.network)

    def generate(
        self,
        params: Params,
        prompts: Sequence[Ids],
        *,
        limits: Sequence[int],
        eos_id: EndIds,
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        streams: Sequence[int] | None = None,
        is_stopped: Callable[[int, np.ndarray], bool] | None = None,
        batch_size: int = 32,
        decoder_prefix: Sequence[int] = (),
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (number, tokens, log-probabilities) of each completed prompt. See `complete_all`.

        Each text has its own stream of random numbers, by default its number. A decoder behind an encoder continues
        `decoder_prefix`.
        """
        if not prompts:
            return iter(())
        length = self.prompt_length(max(map(len, prompts)), min(limits))
        rows, multiple = self._rows(len(prompts), batch_size, length + max(limits)), self._sharded.row_multiple
        group = rows if len(prompts) <= rows else round_up(max(rows // 4, 1), multiple)
        programs = _Generation(self, params, sampling, eos_id, seed, max(limits), length, rows, group, tuple(decoder_prefix))
        streams = range(len(prompts)) if streams is None else streams
        return complete_all(programs, prompts, limits, streams, rows=rows, group=group, is_stopped=is_stopped)

    def search(
        self,
        params: Params,
        prompts: Sequence[Ids],
        *,
        max_tokens: int,
        beams: BeamConfig,
        eos_id: EndIds,
        batch_size: int = 32,
        decoder_prefix: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best hypotheses of each prompt: (tokens int32 [N, beams, max_tokens], scores float32 [N, beams])."""
        tokens = np.zeros((len(prompts), beams.size, max_tokens), np.int32)
        scores = np.zeros((len(prompts), beams.size), np.float32)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for batch, rows in self._batches(order, lambda i: (len(prompts[i]) + max_tokens) * beams.size, batch_size):
            ids = self._padded([prompts[i] for i in batch], rows, max_tokens)
            options: dict[str, Any] = dict(config=beams, eos_id=eos_id, decoder_prefix=tuple(decoder_prefix))
            hypotheses = fetch(self._search(params, ids, max_tokens=max_tokens, **options), "a batch's beams")
            tokens[batch], scores[batch] = (x[: len(batch)] for x in hypotheses)
        return tokens, scores

    def score(
        self, params: Params, inputs: Sequence[Ids], targets: Sequence[Ids], *, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (sum of the targets' log-probabilities, float32 [N]; whether greedy decoding gives the target, bool [N]).

        Inputs that several targets of a batch share are read once.
        """
        log_prob, is_greedy = np.zeros((len(inputs),), np.float32), np.zeros((len(inputs),), bool)
        order = sorted(range(len(inputs)), key=lambda i: (-len(inputs[i]), inputs[i], -len(targets[i])))
        for batch, rows in self._batches(order, lambda i: len(inputs[i]) + len(targets[i]), batch_size):
            pairs = [inputs[i] for i in batch], [targets[i] for i in batch]
            prompts = list(dict.fromkeys(map(tuple, pairs[0])))
            # If targets are longer than inputs, reading the inputs again costs less than a cache.
            is_shared = 2 * len(prompts) <= len(batch) and max(map(len, prompts)) >= max(map(len, pairs[1]))
            if self._model.can_generate and is_shared and self._all_fit(*pairs):
                result = self._score_shared(params, *pairs, prompts, rows)
            else:
                features = scoring_batch(*pairs, self._ids["start"], self.length_limits.max_positions)
                result = self._score(params, {name: pad_rows(x, rows) for name, x in features.items()})
            scores = fetch(result, "a batch's scores")
            log_prob[batch] = scores.log_prob[: len(batch)]
            is_greedy[batch] = scores.is_greedy[: len(batch)]
        return log_prob, is_greedy

    def _all_fit(self, inputs: list[Ids], targets: list[Ids]) -> bool:
        """Returns whether the longest target fits after the longest input."""
        room = self.length_limits.input_limit(None, max(map(len, targets)))
        return room is None or max(map(len, inputs)) <= room

    def _score_shared(self, params: Params, inputs: list[Ids], targets: list[Ids], prompts: list[tuple], rows: int):
        steps = bucket(max(map(len, targets)), 4)
        if not self._all_fit(inputs, [[0] * steps]):
            steps = max(map(len, targets))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        prompt_of_row = np.array([number[tuple(text)] for text in inputs], np.int32)
        prompt_rows = round_up(1 << (len(prompts) - 1).bit_length(), self._sharded.row_multiple)
        ids = self._padded(prompts, prompt_rows, steps)
        padded = pad_rows(pad(targets, steps, PADDING), rows, PADDING)
        return self._score_continuations(params, ids, pad_rows(prompt_of_row, rows), padded)

    def _padded(self, prompts: Sequence[Sequence[int]], rows: int, room: int) -> np.ndarray:
        """Returns prompts as int32 [rows, P], where P is one of few lengths and leaves `room` for new tokens."""
        longest = max((len(prompt) for prompt in prompts), default=0)
        return pad_rows(pad(prompts, self.prompt_length(longest, room), PADDING), rows, PADDING)

    def prompt_length(self, longest: int, room: int) -> int:
        """Returns the padded length of prompts of up to `longest` tokens, which leaves `room` for new tokens."""
        limit = self.length_limits.input_limit(None, room)
        return bucket(longest) if limit is None else min(bucket(longest), limit)

    def _rows(self, texts: int, batch_size: int, length: int) -> int:
        """Returns the rows of a batch of texts of this length: at most `batch_size`, fewer for long texts."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
        multiple = self._sharded.row_multiple
        return round_up(max(min(batch_size, texts, multiple * MAX_BATCH_TOKENS // bucket(length)), 1), multiple)

    def _batches(self, order: list[int], length: Callable[[int], int], batch_size: int) -> Iterator[tuple[list[int], int]]:
        """Yields (numbers of texts, rows of their batch) in order."""
        start, min_length = 0, 1
        while start < len(order):
            rows = self._rows(len(order), batch_size, min_length)
            while (fewer := self._rows(len(order), batch_size, max(map(length, order[start : start + rows])))) < rows:
                rows = fewer
            yield order[start : start + rows], rows
            start += rows

    @functools.cached_property
    def _score(self):
        return jax.jit(self._model.score, out_shardings=self._sharded.replicated)

    @functools.cached_property
    def _score_continuations(self):
        program = functools.partial(self._model.score_continuations, **self._ids)
        return jax.jit(program, out_shardings=self._sharded.replicated)

    @functools.cached_property
    def _search(self):
        program = functools.partial(search, self._model, **self._ids)
        static = ("max_tokens", "config", "eos_id", "decoder_prefix")
        return jax.jit(program, static_argnames=static, out_shardings=self._sharded.replicated)

    @functools.cached_property
    def start(self):
        def start(params, prompts, limit, stream, *, room, max_tokens, decoder_prefix):
            logits, state = self._model.prefill(params, prompts, room, **self._ids)
            logits, state = generation.force_tokens(self._model.decode_step(params), logits, state, decoder_prefix)
            return generation.start(logits, state, limit, stream, max_tokens)

        return jax.jit(start, static_argnames=("room", "max_tokens", "decoder_prefix"))

    @functools.cached_property
    def put(self):
        return jax.jit(Sequences.put, donate_argnums=0)

    @functools.cached_property
    def run_steps(self):
        def run_steps(params, sequences: Sequences, stopped, seed, max_steps, until, *, config, eos_id):
            sequences = dataclasses.replace(sequences, ended=sequences.ended | stopped)
            step = self._model.decode_step(params)
            options = dict(config=config, eos_id=eos_id, seed=seed, max_steps=max_steps, until=until)
            sequences = generation.generate(step, sequences, **options)
            return sequences, Generated(sequences.tokens, sequences.log_probs, sequences.length, sequences.done)

        out = (None, self._sharded.replicated)
        return jax.jit(run_steps, static_argnames=("config", "eos_id"), donate_argnums=1, out_shardings=out)


@dataclasses.dataclass(frozen=True)
class _Generation:
    """`Programs` of one call of `Inference.generate`. `length` is the padded length of the longest prompts."""

    inference: Inference
    params: Params
    sampling: SamplingConfig
    eos_id: EndIds
    seed: int
    max_tokens: int
    length: int
    rows: int
    group: int
    decoder_prefix: tuple[int, ...]

    def start(self, prompts: list[Ids], limits: list[int], streams: list[int], rows: int | None = None) -> Sequences:
        rows = rows or self.rows
        # The first prompts are the longest.
        length = self.length if rows == self.rows else min(bucket(max(map(len, prompts))), self.length)
        ids = pad_rows(pad(prompts, length, PADDING), rows, PADDING)
        by_row = lambda values: pad_rows(np.array(values, np.int32), rows)
        room = self.max_tokens + len(self.decoder_prefix)
        if not self.inference.has_encoder:  # prompts are in the decoder's cache, whose size is fixed
            positions = self.inference.length_limits.max_positions or np.inf
            room = int(min(self.length + self.max_tokens, positions + 1)) - length
        options = dict(room=room, max_tokens=self.max_tokens, decoder_prefix=self.decoder_prefix)
        return self.inference.start(self.params, ids, by_row(limits), by_row(streams), **options)

    def refill(
        self, sequences: Sequences, rows: list[int], prompts: list[Ids], limits: list[int], streams: list[int]
    ) -> Sequences:
        fresh = self.start(prompts, limits, streams, self.group)
        targets = np.full((self.group,), self.rows, np.int32)
        targets[: len(rows)] = rows
        return self.inference.put(sequences, targets, fresh)

    def generate(self, sequences: Sequences, stopped: np.ndarray, max_steps: int, until: int) -> tuple[Sequences, Generated]:
        args = (self.params, sequences, stopped, np.uint32(self.seed), np.int32(max_steps), np.int32(until))
        sequences, generated = self.inference.run_steps(*args, config=self.sampling, eos_id=self.eos_id)
        return sequences, fetch(generated, "the next tokens of a batch")
