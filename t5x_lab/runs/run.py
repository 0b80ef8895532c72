"""What users import: a model with its parameters and vocabulary, that generates and scores text."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x_lab.checkpoints.manager import save_run
from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.config.user_code import tried
from t5x_lab.data.config import SpecialTokens
from t5x_lab.data.environment import check_environment
from t5x_lab.decoding.beam_search import BeamConfig, beams_of
from t5x_lab.decoding.sampling import LogitsFn, SamplingConfig
from t5x_lab.models.model import Params
from t5x_lab.networks.ensemble import Ensemble
from t5x_lab.networks.head import checked_head
from t5x_lab.networks.network import has_decoder, has_encoder, more_ids
from t5x_lab.runs.classify import class_logits, sequences_for
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.inference import Inference
from t5x_lab.runs.on_its_base import OnItsBase
from t5x_lab.runs.padding import Ids
from t5x_lab.runs.sharded_model import ShardedModel
from t5x_lab.runs.texts import (
    Texts,
    check_beams,
    check_generation,
    check_pairs,
    limits_of,
    numbered,
    without_padding,
)
from t5x_lab.training.step import per_token


class Run(OnItsBase):
    """A loaded model: it generates, scores, gives logits and losses.

    Attributes:
      params: nested dict of arrays, logical names.
      num_parameters: their number.
      mesh: the devices they are on.
      sharded: the model on its mesh, with the programs that do not depend on parameters.
      step: of the checkpoint they came from.
    """

    def __init__(self, config: GinConfig, sharded: ShardedModel, params: Params, step: int):
        super().__init__(config, sharded, params, step)
        self._model = sharded.model
        self._made: list[Inference] = []  # once for this model with whatever parameters
        self.num_parameters = sharded.model.num_parameters
        self.mesh = sharded.mesh

    @functools.cached_property
    def vocabulary(self):
        """The SeqIO vocabulary of the configuration."""
        check_environment()
        from t5x_lab.data.vocabularies import build_vocabulary

        return build_vocabulary(self.config.vocabulary())

    @property
    def has_encoder(self) -> bool:
        """Whether inputs go into an encoder; else they come before what is generated or scored."""
        return has_encoder(self.network)

    @property
    def generates(self) -> bool:
        """Whether the network decodes step by step."""
        return self._model.generates

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model can tell the positions of; None where nothing limits them."""
        return self._inference.length_limits.max_positions

    @property
    def trained_length(self) -> int | None:
        """Tokens of a sequence that the model was trained at, as an imported one says, or that it has positions for."""
        return getattr(self.network, "max_positions", None) or self.max_positions

    @functools.cached_property
    def special_tokens(self) -> SpecialTokens:
        """Start, end and padding ids, of the configuration."""
        return self.config.special_tokens()

    @functools.cached_property
    def eos_id(self) -> int:
        """What is put behind a text to end it, the vocabulary's end token where it has one; -1 where nothing is."""
        try:
            own = self.vocabulary.eos_id
        except NotSet:  # a model of token ids alone
            own = None
        return next((i for i in (own, *self.special_tokens.ends) if i is not None), -1)

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """What ends a text that is written; what ends those that are read is the first, where it is one of them."""
        ends, eos = self.special_tokens.ends, self.eos_id
        if not ends:
            return () if eos < 0 else (eos,)
        return tuple(sorted(ends, key=lambda end: end != eos))

    @property
    def around_inputs(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text given as an input, behind a decoder's start token."""
        behind = self.special_tokens.input_end or (() if self.eos_id < 0 else (self.eos_id,))
        return list(self.special_tokens.input_start), list(behind) if self.input_eos else []

    @functools.cached_property
    def input_eos(self) -> bool:
        """Whether inputs end with an end token, and so text given as inputs does too: as the checkpoint or the task says."""
        if self.special_tokens.input_eos is not None:
            return self.special_tokens.input_eos
        try:
            data = self.config.data()
        except NotSet:
            return False  # a model without a task
        check_environment()
        from t5x_lab.data.mixture import resolve

        return resolve(data, self.network.architecture).input_eos

    @property
    def _inference(self) -> Inference:
        if not self._made:
            self._made.append(self._make_inference())
        return self._made[0]

    def _make_inference(self) -> Inference:
        start = self.special_tokens.start
        if start is None and self.has_encoder:
            raise UserError("SpecialTokens.start is None; the decoder behind an encoder reads a start token first, T5's is 0.")
        self._model.check_start(start)
        return Inference(self.sharded, start or 0)

    @functools.cached_property
    def _texts(self) -> Texts:
        return Texts(self.vocabulary, self.has_encoder, self.end_ids, self.eos_id, lambda: self.around_inputs)

    def _first(self, add_start: bool) -> list[int]:
        """What a decoder reads before its inputs."""
        start = self.special_tokens.start
        return [] if self.has_encoder or start is None or not add_start else [start]

    @property
    def soft_prompt(self) -> Ids:
        """Ids before inputs where those are a soft prompt's, and no text of a tokenizer's; else none."""
        before = list(self.special_tokens.input_start)
        return before if more_ids(self.network).intersection(before) else []

    def _openings(self, first: Ids) -> list[Ids]:
        """What stays of what is cut from the left: a soft prompt and the start before it, or `first`, where a row begins so."""
        prompt = self.soft_prompt
        return [[*self._first(True), *prompt], first] if prompt else [first]

    def generate(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        max_tokens: int | Sequence[int] = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        num_samples: int = 1,
        seed: int = 0,
        beam_size: int = 1,
        beam_alpha: float | None = None,
        stop: Sequence[str] = (),
        streams: Sequence[int] | None = None,
        max_length: int | None = None,
        logits_fn: LogitsFn | None = None,
        sort_samples: bool = False,
        add_start: bool = True,
        batch_size: int = 32,
    ) -> list[list[str]]:
        """Completes each prompt `num_samples` times; greedy at temperature 0. See `SamplingConfig`.

        With a `beam_size` above 1 the `num_samples` best hypotheses of a beam search are returned; see `BeamConfig`. So it is
        with a `beam_alpha`, 0.6 unless given: a beam of one is T5X's default, whose penalty may choose a later end.

        Args:
          prompts: any number of texts of any lengths; or token ids, taken as they are.
          max_tokens: most tokens to write, for all prompts or for each.
          seed: of everything drawn, below 2**32.
          stop: a completion ends before the first of these texts that it would contain.
          streams: which of the seed's streams of random numbers each prompt draws from; by default its own number's.
          max_length: prompts are cut from the left, so that no more tokens than this are read: by an encoder, or by a decoder
            with those that it writes, the last of which it does not read.
          logits_fn: what logits are replaced by before a token is chosen; see `SamplingConfig`.
          sort_samples: whether a prompt's samples come by their log-probabilities, the most probable last, as T5X's do; else in
            the order in which they are numbered.
          add_start: whether a decoder reads its start token before the prompts; not where token ids have it already.
          batch_size: texts that are written at a time, fewer of long ones; a finished one makes room for the next.

        Returns:
          one list a prompt, of `num_samples` strings without the prompt.
        """
        self._check_generates("generate")
        check_generation(prompts, stop, num_samples, seed, streams)
        if len(prompts) == 0:
            return []
        limits = limits_of(max_tokens, len(prompts))
        ids, _ = self.fit_prompts(prompts, limits, max_length, numbered("Prompt", prompts), add_start)
        if beams := beams_of(beam_size, beam_alpha, logits_fn):
            check_beams(beam_size, temperature, num_samples)
            best: dict[int, list[str]] = {}
            for limit in sorted(set(limits)):  # all of a search are written to one length
                mine = [i for i, own in enumerate(limits) if own == limit]
                found, _ = self._search([ids[i] for i in mine], limit, beams, batch_size)
                for i, rows in zip(mine, found[:, :num_samples], strict=True):
                    best[i] = [self._texts.completion(ids[i], tokens, stop) for tokens in rows]
            return [best[i] for i in range(len(ids))]

        repeat = lambda values: [value for value in values for _ in range(num_samples)]
        ids, limits = repeat(ids), repeat(limits)
        firsts = range(len(prompts)) if streams is None else streams
        streams = [stream * num_samples + sample for stream in firsts for sample in range(num_samples)]
        text_of = lambda i, tokens: self._texts.completion(ids[i], tokens)
        generated = self._inference.generate(
            self.params,
            ids,
            limits=limits,
            eos_id=self.end_ids,
            sampling=SamplingConfig(temperature, top_k, top_p, logits_fn, rescale_log_probs=sort_samples),
            seed=seed,
            streams=streams,
            is_stopped=(lambda i, tokens: any(end in text_of(i, tokens) for end in stop)) if stop else None,
            batch_size=batch_size,
        )
        texts, scores = [""] * len(ids), [0.0] * len(ids)
        for i, tokens, log_probs in generated:
            texts[i], scores[i] = self._texts.completion(ids[i], tokens, stop), float(log_probs.sum())
        samples_of = [range(i, i + num_samples) for i in range(0, len(ids), num_samples)]
        return [[texts[i] for i in (sorted(each, key=scores.__getitem__) if sort_samples else each)] for each in samples_of]

    def generate_tokens(
        self,
        prompts,
        *,
        max_tokens: int,
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        batch_size: int = 32,
        beginning: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Completes token ids: an array int [B, P] with padding on the right, or lists of them without.

        `beginning` are ids that every completion is made to begin with; what is returned comes behind them.

        Returns:
          (tokens int32 [B, max_tokens], padding after the end token; log-probability of each, float32)
        """
        self._check_generates("generate_tokens")
        limits = limits_of(max_tokens, len(prompts))
        ids, forced = self._begun(self._fit_ids(prompts, [limit + len(beginning) for limit in limits]), beginning)
        tokens = np.full((len(prompts), max_tokens), self.special_tokens.padding, np.int32)
        log_probs = np.zeros(tokens.shape, np.float32)
        options: dict[str, Any] = dict(eos_id=self.end_ids, sampling=sampling, seed=seed, batch_size=batch_size)
        options["beginning"] = forced
        for i, new, new_log_probs in self._inference.generate(self.params, ids, limits=limits, **options):
            tokens[i, : len(new)], log_probs[i, : len(new)] = new, new_log_probs
        return tokens, log_probs

    def search_tokens(
        self,
        prompts,
        *,
        max_tokens: int,
        beams: BeamConfig = BeamConfig(),
        batch_size: int = 32,
        beginning: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches completions of token ids: an array int [B, P] with padding on the right, or lists of them without.

        For `beginning` see `generate_tokens`.

        Returns:
          (tokens int32 [B, beam size, max_tokens], 0 after the end token; scores float32 [B, beam size]), best first
        """
        self._check_generates("search_tokens")
        limits = limits_of(max_tokens, len(prompts))
        ids, forced = self._begun(self._fit_ids(prompts, [limit + len(beginning) for limit in limits]), beginning)
        return self._search(ids, max_tokens, beams, batch_size, forced)

    def _search(
        self, ids: list[Ids], max_tokens: int, beams: BeamConfig, batch_size: int, beginning: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        options: dict[str, Any] = dict(max_tokens=max_tokens, beams=beams, eos_id=self.end_ids, batch_size=batch_size)
        return self._inference.search(self.params, ids, beginning=beginning, **options)

    def _begun(self, ids: list[Ids], beginning: Sequence[int]) -> tuple[list[Ids], Sequence[int]]:
        """Prompts with `beginning` behind them, and what a decoder behind an encoder goes on from instead."""
        return (ids, beginning) if self.has_encoder else ([[*row, *beginning] for row in ids], ())

    def _fit_ids(self, prompts, limits: list[int]) -> list[Ids]:
        first = self._first(True)
        ids = [[*first, *row] for row in without_padding(prompts, self.special_tokens.padding)]
        return self._inference.length_limits.fit_prompts(ids, limits, None, numbered("Prompt", prompts), self._openings(first))

    def score(self, inputs, targets, *, eos: bool = False) -> np.ndarray:
        """Sum of the log-probabilities of the target tokens, float32 [B]; no z-loss, no label smoothing. See `scores`."""
        return self.scores(inputs, targets, eos=eos).log_prob

    def scores(
        self,
        inputs,
        targets,
        *,
        eos: bool = False,
        max_length: int | None = None,
        add_start: bool = True,
        batch_size: int = 32,
        names: Sequence[str] | None = None,
    ) -> "TargetScores":
        """What the model gives to each target after its inputs. Targets of the same inputs share the reading of them.

        Args:
          inputs, targets: lists of strings; or integer arrays [B, K] and [B, T] with padding on the right, or lists of ids,
            taken as they are. Inputs that do not fit are cut from the left.
          eos: whether an end token is added to target strings and scored with them.
          max_length: an encoder reads no more tokens than this, or a decoder no more with those of the target.
          add_start: whether a decoder reads its start token before the inputs; not where ids have it already.
          batch_size: targets that are scored at a time, fewer of long ones.
          names: what messages call the pairs.

        Raises:
          UserError: for a target that does not fit by itself.
        """
        self._check_decoder("score")
        check_pairs(inputs, targets)
        characters = None
        if len(inputs) and isinstance(targets[0], str):
            characters = np.array([len(text) for text in targets])
            encoded = {text: self._texts.encode_input(text) for text in set(inputs)}
            inputs, targets = [encoded[text] for text in inputs], [self._texts.encode(text, eos) for text in targets]
        else:
            inputs, targets = (without_padding(rows, self.special_tokens.padding) for rows in (inputs, targets))
        names = names or numbered("Pair", inputs)
        first = self._first(add_start)
        inputs = [[*first, *row] for row in inputs]
        fitting = self._inference.length_limits.fit_inputs(inputs, targets, max_length, names, self._openings(first))
        log_prob, is_greedy = self._inference.score(self.params, fitting, targets, batch_size=batch_size)
        return TargetScores(
            log_prob=log_prob,
            is_greedy=is_greedy,
            tokens=np.array([len(target) for target in targets], int),
            characters=characters,
            cut=np.array([len(a) - len(b) for a, b in zip(inputs, fitting, strict=True)], int),
        )

    def fit_prompts(
        self,
        prompts,
        max_tokens: int | Sequence[int],
        max_length: int | None,
        names: Sequence[str],
        add_start: bool = True,
    ) -> tuple[list[list[int]], list[int]]:
        """Token ids of prompts as `generate` reads them, a decoder's start token first, and how many it cuts from each.

        Raises:
          UserError: for a prompt that cannot be read, by its name.
        """
        first = self._first(add_start)
        whole = [[*first, *self._texts.encode_input(prompt)] for prompt in prompts]
        limits = limits_of(max_tokens, len(whole))
        ids = self._inference.length_limits.fit_prompts(whole, limits, max_length, names, self._openings(first))
        return ids, [len(a) - len(b) for a, b in zip(whole, ids, strict=True)]

    def classify(self, texts: Sequence[Any], *, batch_size: int = 32, names: Sequence[str] | None = None) -> list[Any]:
        """Labels and probabilities, by the classification head.

        Args:
          texts: each a text; or the texts of the task's segments, and for a choice behind them the list of the choices:
            ("premise", "hypothesis"), ("context", ["one ending", "another"]); or the fields of a record, by name.
          batch_size: texts at a time.
          names: what messages call them.

        Returns:
          `t5x_lab.evaluation.classification.Classified`, with `label` and `probabilities`, one a text.

        Raises:
          UserError: for a model without a head, and what has other texts than the task that it was trained on.
        """
        self._check_one("classify")
        head = checked_head(self.network)
        if isinstance(texts, str):
            raise UserError("classify takes a list of texts; put the text into one: [text].")
        from t5x_lab.evaluation.classification import classified

        sequences = sequences_for(self, texts, names or numbered("Text", texts))
        return classified(self.class_logits(sequences, batch_size=batch_size), head)

    def class_logits(self, examples: Sequence[Sequence[Ids]], *, batch_size: int = 32) -> np.ndarray:
        """Logits of the classes, float32 [N, C], of the token ids of examples' sequences."""
        return class_logits(self, examples, batch_size)

    def logits(self, **features) -> np.ndarray:
        """Teacher-forced logits, float32 [B, T, V], of SeqIO model features (`decoder_input_tokens`, …)."""
        batch = {name: np.asarray(x) for name, x in features.items()}
        network = self.network
        needed = ["decoder_input_tokens"] * has_decoder(network) + ["encoder_input_tokens"] * has_encoder(network)
        missing = [name for name in needed if name not in batch]
        if missing:
            raise UserError(f"logits needs {missing[0]} for a model of architecture {network.architecture}.")
        what = f"The network fails on the features {', '.join(batch)}"
        return np.asarray(tried(what, lambda: self._logits(self.params, batch)))

    @property
    def _logits(self):
        return self.sharded.logits

    def loss(self, batch: dict) -> dict[str, float]:
        """`loss` (cross-entropy per token with loss), `z_loss` (the same for z-loss) and `weight_sum` of a batch."""
        targets = f"{'decoder' if has_decoder(self.network) else 'encoder'}_target_tokens"
        if targets not in batch:
            raise UserError(f"loss needs {targets} in the batch, besides what logits needs.")
        sums = self._loss(self.params, {name: np.asarray(x) for name, x in batch.items()})
        means = per_token(sums)
        return {"loss": float(means["loss"]), "z_loss": float(means["z_loss"]), "weight_sum": float(sums.weights)}

    @property
    def _loss(self):
        return self.sharded.loss

    def save(self, directory: str) -> None:
        """Writes a run directory that `t5x_lab.load` reads: the configuration and the parameters."""
        if isinstance(self.network, Ensemble):
            raise UserError("An ensemble is not saved as one model; save its members.")
        save_run(directory, self.config.text, self.params, self.step)

    def _check_decoder(self, function: str) -> None:
        if not has_decoder(self.network):
            raise UserError(
                f"{function} needs a model that writes one token after the other; an encoder alone predicts masked tokens in "
                "place. Use its logits, or train a decoder or an encoder-decoder."
            )

    def _check_generates(self, function: str) -> None:
        self._check_decoder(function)
        self._model.check_generates(function)


@dataclasses.dataclass(frozen=True)
class TargetScores:
    """Scores of B targets, and what they are divided by to compare targets of different lengths.

    Attributes:
      log_prob: sum of the log-probabilities of the target's tokens, float32 [B].
      is_greedy: whether greedy decoding would have written it, bool [B].
      tokens: scored ones, the end token included where it was asked for, int [B].
      characters: of the target's text, int [B]; None for token ids.
      cut: tokens that were cut from the left of the inputs, int [B].
    """

    log_prob: np.ndarray
    is_greedy: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray | None
    cut: np.ndarray
