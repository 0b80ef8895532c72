"""A placed model asked about token ids: texts of any number and length, sorted, batched, padded and put back in order.

Texts are lists of ids without padding. Several processes make the same calls and get the same answers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.decoding import writing
from t5x_lab.decoding.beam_search import BeamConfig, search
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.decoding.writing import Slots, Written, write_all
from t5x_lab.models.model import Params
from t5x_lab.networks.config import TransformerConfig
from t5x_lab.runs.assemble import Placed

Text = list[int]


class Inference:
    """The compiled programs of a model, for whatever parameters.

    Args:
      placed: model and mesh.
    """

    def __init__(self, placed: Placed):
        self._placed, self._model = placed, placed.model
        self._network = placed.model.config.network
        self.has_encoder = self._network.has_encoder

    @property
    def most_positions(self) -> int | None:
        """Tokens that the model can tell the positions of; None where nothing limits them."""
        c = self._network
        return c.max_positions if isinstance(c, TransformerConfig) and c.positions == "learned" else None

    def room(self, max_length: int | None, written: int) -> int | None:
        """Tokens of an input beside `written` ones, where `max_length` or positions limit a sequence; None = any number."""
        limits = [limit for limit in (max_length, self.most_positions) if limit is not None]
        return min(limits) - (0 if self.has_encoder else written) if limits else None

    def fit_prompts(
        self, prompts: Sequence[Text], limits: Sequence[int], max_length: int | None, names: Sequence[str]
    ) -> list[Text]:
        """Prompts cut from the left, where `max_length` is given, to leave room for `limits` tokens after them.

        Raises:
          UserError: for a prompt that cannot be read, by its name.
        """
        fitting = []
        for prompt, limit, name in zip(prompts, limits, names, strict=True):
            room = self.room(max_length, limit)
            self._check_ids(prompt, name)
            if self.most_positions is not None and limit > self.most_positions:
                raise UserError(f"{name}: {limit} tokens to write are more than the model's {self.most_positions} positions.")
            if room is not None and (room < 1 if prompt else room < 0):
                raise UserError(
                    f"{name}: beside {limit} tokens to write there is no room for a prompt in {room + limit} tokens. Write "
                    "fewer, or raise max_length."
                )
            if room is not None and len(prompt) > room and max_length is None:
                raise UserError(
                    f"{name} has {len(prompt)} tokens, more than the {room} that the model's positions leave beside {limit} to "
                    f"write. Shorten it, or give max_length={self.most_positions} to cut such prompts from the left."
                )
            fitting.append(_last(prompt, room))
        return fitting

    def fit_inputs(
        self, inputs: Sequence[Text], targets: Sequence[Text], max_length: int | None, names: Sequence[str]
    ) -> list[Text]:
        """Inputs cut from the left, to leave room for their targets.

        Raises:
          UserError: for a target that does not fit, or inputs that cannot be read, by their name.
        """
        fitting = []
        for text, target, name in zip(inputs, targets, names, strict=True):
            most, room = self.room(max_length, 0), self.room(max_length, len(target))
            self._check_ids(text, name)
            if most is not None and len(target) > most - (bool(text) and not self.has_encoder):
                raise UserError(
                    f"{name} has a target of {len(target)} tokens, which leaves no room for inputs in the {most} that "
                    "max_length or the model's positions allow; only inputs are cut. Shorten it."
                )
            fitting.append(_last(text, room))
        return fitting

    def _check_ids(self, text: Text, name: str) -> None:
        if self.has_encoder and not text:
            raise UserError(f"{name} has no tokens to read; an encoder reads at least one.")
        wrong = [i for i in text if not 0 < i < self._network.vocab_size]
        if wrong:
            raise UserError(f"{name} holds the id {wrong[0]}; the model's ids are below {self._network.vocab_size}.")

    def generate(
        self,
        params: Params,
        prompts: Sequence[Text],
        *,
        limits: Sequence[int],
        eos_id: int,
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        streams: Sequence[int] | None = None,
        is_stopped: Callable[[int, np.ndarray], bool] | None = None,
        batch_size: int = 32,
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Completes prompts that fit; see `write_all`. A text draws from its own stream of random numbers, by default its
        number."""
        if not prompts:
            return iter(())
        rows, multiple = self._rows(len(prompts), batch_size), self._placed.row_multiple
        group = rows if len(prompts) <= rows else round_up(max(rows // 4, 1), multiple)
        length = self.prompt_length(max(map(len, prompts)), min(limits))
        programs = _Generation(self, params, sampling, eos_id, seed, max(limits), length, rows, group)
        streams = range(len(prompts)) if streams is None else streams
        return write_all(programs, prompts, limits, streams, rows=rows, group=group, is_stopped=is_stopped)

    def search(
        self, params: Params, prompts: Sequence[Text], *, max_tokens: int, beams: BeamConfig, eos_id: int, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best hypotheses of each prompt: (tokens int32 [N, beam size, max_tokens], scores float32 [N, beam size])."""
        tokens = np.zeros((len(prompts), beams.size, max_tokens), np.int32)
        scores = np.zeros((len(prompts), beams.size), np.float32)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        rows = self._rows(len(prompts), batch_size)
        for batch in _batches(order, rows):
            ids = self._padded([prompts[i] for i in batch], rows, max_tokens)
            found = self._search(params, ids, max_tokens=max_tokens, config=beams, eos_id=eos_id)
            tokens[batch], scores[batch] = (np.asarray(x)[: len(batch)] for x in found)
        return tokens, scores

    def score(
        self, params: Params, inputs: Sequence[Text], targets: Sequence[Text], *, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """(sum of the targets' log-probabilities, float32 [N]; whether each token is the likeliest one, bool [N]).

        Where a batch holds several targets of the same inputs, these are read once.
        """
        log_prob, is_greedy = np.zeros((len(inputs),), np.float32), np.zeros((len(inputs),), bool)
        order = sorted(range(len(inputs)), key=lambda i: (-len(inputs[i]), inputs[i], len(targets[i])))
        rows = self._rows(len(inputs), batch_size)
        for batch in _batches(order, rows):
            mine = [inputs[i] for i in batch], [targets[i] for i in batch]
            prompts = list(dict.fromkeys(map(tuple, mine[0])))
            if 2 * len(prompts) <= len(batch) and self._all_fit(*mine):
                scores = self._score_shared(params, *mine, prompts, rows)
            else:
                features = scoring_batch(*mine, self.has_encoder, self.most_positions)
                scores = self._score(params, {name: pad_rows(x, rows) for name, x in features.items()})
            log_prob[batch] = np.asarray(scores.log_prob)[: len(batch)]
            is_greedy[batch] = np.asarray(scores.is_greedy)[: len(batch)]
        return log_prob, is_greedy

    def _all_fit(self, inputs: list[Text], targets: list[Text]) -> bool:
        """Whether any of the targets could follow any of the inputs."""
        room = self.room(None, max(map(len, targets)))
        return room is None or max(map(len, inputs)) <= room

    def _score_shared(self, params: Params, inputs: list[Text], targets: list[Text], prompts: list[tuple], rows: int):
        steps = bucket(max(map(len, targets)), 4)
        if not self._all_fit(inputs, [[0] * steps]):
            steps = max(map(len, targets))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        of_row = np.array([number[tuple(text)] for text in inputs], np.int32)
        many = round_up(1 << (len(prompts) - 1).bit_length(), self._placed.row_multiple)
        ids = self._padded(prompts, many, steps)
        return self._score_continuations(params, ids, pad_rows(of_row, rows), pad_rows(pad(targets, steps), rows))

    def _padded(self, prompts: Sequence[Sequence[int]], rows: int, room: int) -> np.ndarray:
        """Prompts as int32 [rows, P], with P one of few lengths that leaves the model `room` for what is written."""
        longest = max((len(prompt) for prompt in prompts), default=0)
        return pad_rows(pad(prompts, self.prompt_length(longest, room)), rows)

    def prompt_length(self, longest: int, room: int) -> int:
        """What prompts of at most so many tokens are padded to, where the longest leaves the model `room`."""
        most = self.room(None, room)
        return bucket(longest) if most is None else min(bucket(longest), most)

    def _rows(self, texts: int, batch_size: int) -> int:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
        return round_up(max(min(batch_size, texts), 1), self._placed.row_multiple)

    @functools.cached_property
    def _score(self):
        return jax.jit(self._model.score, out_shardings=self._placed.replicated)

    @functools.cached_property
    def _score_continuations(self):
        return jax.jit(self._model.score_continuations, out_shardings=self._placed.replicated)

    @functools.cached_property
    def _search(self):
        program = functools.partial(search, self._model)
        return jax.jit(program, static_argnames=("max_tokens", "config", "eos_id"), out_shardings=self._placed.replicated)

    @functools.cached_property
    def begin(self):
        def begin(params, prompts, limit, stream, *, most, max_tokens):
            logits, state = self._model.prefill(params, prompts, most)
            return writing.begin(logits, state, limit, stream, max_tokens)

        return jax.jit(begin, static_argnames=("most", "max_tokens"))

    @functools.cached_property
    def put(self):
        return jax.jit(Slots.put, donate_argnums=0)

    @functools.cached_property
    def write(self):
        def write(params, slots: Slots, stopped, seed, at_most, until, *, config, eos_id):
            slots = dataclasses.replace(slots, ended=slots.ended | stopped)
            step = self._model.stepper(params)
            slots = writing.write(step, slots, config=config, eos_id=eos_id, seed=seed, at_most=at_most, until=until)
            return slots, Written(slots.tokens, slots.log_probs, slots.written, slots.done)

        return jax.jit(
            write, static_argnames=("config", "eos_id"), donate_argnums=1, out_shardings=(None, self._placed.replicated)
        )


@dataclasses.dataclass(frozen=True)
class _Generation:
    """`t5x_lab.decoding.writing.Programs` of one call; `length` is what the longest prompts are padded to."""

    inference: Inference
    params: Params
    sampling: SamplingConfig
    eos_id: int
    seed: int
    max_tokens: int
    length: int
    rows: int
    group: int

    def begin(self, prompts: list[Text], limits: list[int], streams: list[int], rows: int | None = None) -> Slots:
        rows = rows or self.rows
        # All that follow fit into the first ones' length.
        length = self.length if rows == self.rows else min(bucket(max(map(len, prompts))), self.length)
        ids = pad_rows(pad(prompts, length), rows)
        of_row = lambda values: pad_rows(np.array(values, np.int32), rows)
        most = self.max_tokens
        if not self.inference.has_encoder:  # prompts are in the cache that is written to, whose size stays
            positions = self.inference.most_positions or np.inf
            most = int(min(self.length + self.max_tokens, positions)) - length
        return self.inference.begin(self.params, ids, of_row(limits), of_row(streams), most=most, max_tokens=self.max_tokens)

    def refill(self, slots: Slots, rows: list[int], prompts: list[Text], limits: list[int], streams: list[int]) -> Slots:
        fresh = self.begin(prompts, limits, streams, self.group)
        to = np.full((self.group,), self.rows, np.int32)
        to[: len(rows)] = rows
        return self.inference.put(slots, to, fresh)

    def write(self, slots: Slots, stopped: np.ndarray, at_most: int, until: int) -> tuple[Slots, Written]:
        args = (self.params, slots, stopped, np.uint32(self.seed), np.int32(at_most), np.int32(until))
        slots, written = self.inference.write(*args, config=self.sampling, eos_id=self.eos_id)
        return slots, jax.tree.map(np.asarray, written)


def scoring_batch(
    inputs: Sequence[Text], targets: Sequence[Text], has_encoder: bool, most: int | None = None
) -> dict[str, np.ndarray]:
    """Model features that put loss on the targets alone: inputs into the encoder, or before them as a prefix.

    Rows are padded to one of few lengths, but not beyond `most`.
    """

    def width(rows: Sequence[Text]) -> int:
        length = bucket(max(map(len, rows)))
        return length if most is None else min(length, most)

    if has_encoder:
        target_tokens = pad(targets, width(targets))
        return {
            "encoder_input_tokens": pad(inputs, width(inputs)),
            "decoder_input_tokens": np.pad(target_tokens, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": target_tokens,
        }
    rows = [[*i, *t] for i, t in zip(inputs, targets, strict=True)]
    tokens = pad(rows, width(rows))
    position = np.arange(tokens.shape[1])
    prefix = np.array([len(row) for row in inputs])[:, None]
    return {
        "decoder_input_tokens": np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": ((position >= prefix) & (tokens > 0)).astype(np.int32),
        # One more than the prefix: inputs are shifted to the right by one.
        "decoder_causal_attention": (position <= prefix).astype(np.int32),
    }


def bucket(length: int, least: int = 16) -> int:
    """One of few lengths, at most a quarter longer (or `least`), so that few programs are compiled."""
    return max(round_up(length, max(least, 1 << max((length - 1).bit_length() - 3, 0))), least)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Int32 [len(rows), length], 0 behind each row's ids."""
    out = np.zeros((len(rows), length), np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


def pad_rows(x: np.ndarray, rows: int) -> np.ndarray:
    """`x` with rows of zeros behind its own."""
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))


def _last(text: Text, room: int | None) -> Text:
    return text if room is None else text[max(len(text) - room, 0) :]


def _batches(order: list[int], rows: int) -> Iterator[list[int]]:
    return (order[i : i + rows] for i in range(0, len(order), rows))
