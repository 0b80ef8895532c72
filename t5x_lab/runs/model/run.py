"""`Run`: a loaded model with its parameters and vocabulary, which generates, scores and classifies text."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from t5x_lab.checkpoints.manager import save_run
from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.config.log import log
from t5x_lab.config.user_code import call_user_code
from t5x_lab.data.vocabularies.config import SpecialTokens
from t5x_lab.decoding.beam_search import BeamConfig, make_beam_config
from t5x_lab.decoding.sampling import LogitsFn, SamplingConfig
from t5x_lab.networks.ensemble import Ensemble
from t5x_lab.networks.functional import Params
from t5x_lab.networks.head import require_head
from t5x_lab.networks.network import additional_ids, has_decoder, has_encoder
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.trust import remember
from t5x_lab.runs.data_layer import load_data_layer
from t5x_lab.runs.model import peft
from t5x_lab.runs.model.classify import class_logits, encode_segments
from t5x_lab.runs.model.inference import Inference
from t5x_lab.runs.model.padding import Ids
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.model.texts import (
    Texts,
    check_beams,
    check_generation,
    check_pairs,
    item_names,
    resolve_max_tokens,
    strip_padding,
)
from t5x_lab.training.step import per_token


class Run:
    """A loaded model.

    Attributes:
      config: the configuration.
      sharded: the model on its mesh, with compiled functions.
      params: nested dict of arrays with logical names.
      num_parameters: number of parameters.
      mesh: mesh of the devices.
      step: step of the checkpoint.
    """

    def __init__(self, config: GinConfig, sharded: ShardedModel, params: Params, step: int):
        self.config, self.sharded, self.params, self.step = config, sharded, params, step
        self.num_parameters, self.mesh = sharded.model.num_parameters, sharded.mesh
        self.resolved: dict[str, Any] = {}  # resolved mixtures of evaluations
        self._model = sharded.model
        # Shared by copies with other parameters, see `with_params`.
        self._inference_cache: list[Inference] = []
        self._variants: dict[str, Run] = {}

    @property
    def network(self) -> Any:
        """Configuration of the network."""
        return self._model.config.network

    @functools.cached_property
    def vocabulary(self):
        """SeqIO vocabulary of targets, and of inputs unless INPUT_VOCABULARY is set."""
        load_data_layer()
        from t5x_lab.data.vocabularies.build import build_vocabulary  # needs TensorFlow

        return build_vocabulary(self.config.vocabulary())

    @functools.cached_property
    def input_vocabulary(self):
        """SeqIO vocabulary of inputs."""
        load_data_layer()
        from t5x_lab.data.vocabularies.build import build_vocabulary  # needs TensorFlow

        setting = self.config.input_vocabulary()
        return self.vocabulary if setting == self.config.vocabulary() else build_vocabulary(setting)

    @property
    def has_encoder(self) -> bool:
        """Whether the network has an encoder. Otherwise inputs are a prefix of the decoder's sequence."""
        return has_encoder(self.network)

    @property
    def can_generate(self) -> bool:
        """Whether the network has a decode step."""
        return self._model.can_generate

    @property
    def max_positions(self) -> int | None:
        """Maximum length of a sequence, None if unlimited."""
        return self._inference.length_limits.max_positions

    @property
    def trained_length(self) -> int | None:
        """Length of sequences in training, from an imported configuration or from the positions. None = unknown."""
        return getattr(self.network, "max_positions", None) or self.max_positions

    @functools.cached_property
    def special_tokens(self) -> SpecialTokens:
        """Start, stop and padding ids."""
        return self.config.special_tokens()

    @functools.cached_property
    def eos_id(self) -> int:
        """EOS token of texts: the vocabulary's, else the first stop id, else -1."""
        return next((i for i in (self._eos_of("vocabulary"), *self.special_tokens.stop_ids) if i is not None), -1)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that stop generation. The first one also ends input texts if it is the EOS token."""
        stop_ids, eos = self.special_tokens.stop_ids, self.eos_id
        if not stop_ids:
            return () if eos < 0 else (eos,)
        return tuple(sorted(stop_ids, key=lambda i: i != eos))

    @property
    def input_affixes(self) -> tuple[list[int], list[int]]:
        """Ids before and after an input text, after a decoder's start token."""
        eos = self._eos_of("input_vocabulary")
        eos = self.eos_id if eos is None else eos
        suffix = self.special_tokens.input_end or (() if eos < 0 else (eos,))
        return list(self.special_tokens.input_start), list(suffix) if self.input_eos else []

    @functools.cached_property
    def input_eos(self) -> bool:
        """Whether inputs end with an EOS token, according to the checkpoint or the task."""
        if self.special_tokens.input_eos is not None:
            return self.special_tokens.input_eos
        try:
            data = self.config.data()
        except NotSet:
            return False  # a model without a task
        load_data_layer()
        from t5x_lab.data.tasks.mixture import resolve_mixture  # needs TensorFlow

        return resolve_mixture(data, self.network.architecture).input_eos

    @property
    def soft_prompt(self) -> Ids:
        """Ids of the soft prompt before inputs, empty without one."""
        prefix = list(self.special_tokens.input_start)
        return prefix if additional_ids(self.network).intersection(prefix) else []

    # ---- generation

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
        skip_special_tokens: bool = True,
        batch_size: int = 32,
    ) -> list[list[str]]:
        """Completes each prompt `num_samples` times, greedily at temperature 0. See `SamplingConfig`.

        With `beam_size` above 1 or a `beam_alpha`, returns the `num_samples` best hypotheses of a beam search. See
        `BeamConfig`. A beam of one is T5X's default, whose length penalty may choose a later EOS.

        Args:
          prompts: texts, or token ids, which are used unchanged.
          max_tokens: maximum number of new tokens, for all prompts or for each.
          temperature, top_k, top_p: see `SamplingConfig`.
          num_samples: number of completions of each prompt.
          seed: seed of sampling, below 2**32.
          beam_size, beam_alpha: see `BeamConfig`. `beam_alpha` is 0.6 by default.
          stop: texts that end a completion, which is cut before them.
          streams: random number stream of each prompt. Default: the prompt's number.
          max_length: maximum number of tokens of an encoder's input, or of prompt and new tokens without the last one in a
            decoder-only model. Longer prompts are truncated from the left.
          logits_fn: replaces logits before a token is chosen, see `SamplingConfig`.
          sort_samples: whether samples of a prompt are sorted by log-probability, highest last, as in T5X.
          add_start: whether a start token is added before a decoder's prompts. Set False for token ids that have it.
          skip_special_tokens: whether sentinels, control tokens and the unknown token are left out, as in `transformers`.
          batch_size: texts generated at a time. Batches of long texts are smaller. A finished text makes room for the next.

        Returns:
          One list per prompt of `num_samples` texts without the prompt.
        """
        self._check_can_generate("generate")
        check_generation(prompts, stop, num_samples, seed, streams)
        if len(prompts) == 0:
            return []
        limits = resolve_max_tokens(max_tokens, len(prompts))
        ids, _ = self.truncate_prompts(prompts, limits, max_length, item_names("Prompt", prompts), add_start)
        if beams := make_beam_config(beam_size, beam_alpha, logits_fn):
            check_beams(beam_size, temperature, num_samples)
            decode = lambda i, tokens: self._texts.completion(ids[i], tokens, stop, skip_special_tokens)
            return self._generate_beams(ids, limits, beams, num_samples, decode, batch_size)

        repeat = lambda values: [value for value in values for _ in range(num_samples)]
        ids, limits = repeat(ids), repeat(limits)
        prompt_streams = range(len(prompts)) if streams is None else streams
        streams = [stream * num_samples + sample for stream in prompt_streams for sample in range(num_samples)]
        decode = lambda i, tokens: self._texts.completion(ids[i], tokens, (), skip_special_tokens)
        generated = self._inference.generate(
            self.params,
            ids,
            limits=limits,
            eos_id=self.stop_ids,
            sampling=SamplingConfig(temperature, top_k, top_p, logits_fn, rescale_log_probs=sort_samples),
            seed=seed,
            streams=streams,
            is_stopped=(lambda i, tokens: any(text in decode(i, tokens) for text in stop)) if stop else None,
            batch_size=batch_size,
        )
        texts, scores = [""] * len(ids), [0.0] * len(ids)
        for i, tokens, log_probs in generated:
            texts[i] = self._texts.completion(ids[i], tokens, stop, skip_special_tokens)
            scores[i] = float(log_probs.sum())
        groups = [range(i, i + num_samples) for i in range(0, len(ids), num_samples)]
        order = lambda group: sorted(group, key=scores.__getitem__) if sort_samples else group
        return [[texts[i] for i in order(group)] for group in groups]

    def _generate_beams(
        self,
        ids: list[Ids],
        limits: list[int],
        beams: BeamConfig,
        num_samples: int,
        decode: Callable[[int, np.ndarray], str],
        batch_size: int,
    ) -> list[list[str]]:
        texts: dict[int, list[str]] = {}
        for limit in sorted(set(limits)):  # hypotheses of a search have one length
            numbers = [i for i, prompt_limit in enumerate(limits) if prompt_limit == limit]
            hypotheses, _ = self._search([ids[i] for i in numbers], limit, beams, batch_size)
            for i, rows in zip(numbers, hypotheses[:, :num_samples], strict=True):
                texts[i] = [decode(i, tokens) for tokens in rows]
        return [texts[i] for i in range(len(ids))]

    def generate_tokens(
        self,
        prompts,
        *,
        max_tokens: int,
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        batch_size: int = 32,
        decoder_prefix: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Completes token ids.

        Args:
          prompts: int [B, P] with padding on the right, or lists of ids without padding.
          max_tokens: maximum number of new tokens.
          sampling, seed, batch_size: see `generate`.
          decoder_prefix: ids that every completion begins with. They are not returned.

        Returns:
          (tokens int32 [B, max_tokens], padding after the stop id; log-probability of each, float32)
        """
        self._check_can_generate("generate_tokens")
        limits = resolve_max_tokens(max_tokens, len(prompts))
        ids, forced = self._with_decoder_prefix(prompts, limits, decoder_prefix)
        tokens = np.full((len(prompts), max_tokens), self.special_tokens.padding, np.int32)
        log_probs = np.zeros(tokens.shape, np.float32)
        options: dict[str, Any] = dict(eos_id=self.stop_ids, sampling=sampling, seed=seed, batch_size=batch_size)
        options["decoder_prefix"] = forced
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
        decoder_prefix: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Completes token ids by beam search. See `generate_tokens` for the arguments.

        Returns:
          (tokens int32 [B, beam size, max_tokens], 0 after the stop id; scores float32 [B, beam size]), best first
        """
        self._check_can_generate("search_tokens")
        ids, forced = self._with_decoder_prefix(prompts, resolve_max_tokens(max_tokens, len(prompts)), decoder_prefix)
        return self._search(ids, max_tokens, beams, batch_size, forced)

    def _search(
        self, ids: list[Ids], max_tokens: int, beams: BeamConfig, batch_size: int, decoder_prefix: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        options: dict[str, Any] = dict(max_tokens=max_tokens, beams=beams, eos_id=self.stop_ids, batch_size=batch_size)
        return self._inference.search(self.params, ids, decoder_prefix=decoder_prefix, **options)

    def _with_decoder_prefix(self, prompts, limits: list[int], prefix: Sequence[int]) -> tuple[list[Ids], Sequence[int]]:
        """Returns (truncated prompts, ids to force in a decoder behind an encoder).

        A decoder-only model gets the prefix in its prompts.
        """
        ids = self._truncate_ids(prompts, [limit + len(prefix) for limit in limits])
        return (ids, prefix) if self.has_encoder else ([[*row, *prefix] for row in ids], ())

    def score(self, inputs, targets, *, eos: bool = False) -> np.ndarray:
        """Returns the sum of the log-probabilities of the target tokens, float32 [B], without z-loss and label smoothing.

        See `scores` for the arguments.
        """
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
        """Scores each target after its inputs. Inputs that several targets share are read once.

        Args:
          inputs, targets: lists of texts; or integer arrays [B, K] and [B, T] with padding on the right, or lists of ids, used
            unchanged. Inputs that do not fit are truncated from the left.
          eos: whether an EOS token is added to target texts and scored.
          max_length: maximum number of tokens that an encoder reads, or that a decoder reads including the target.
          add_start: whether a start token is added before a decoder's inputs. Set False for token ids that have it.
          batch_size: targets scored at a time. Batches of long ones are smaller.
          names: names of the pairs in messages.

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
            inputs, targets = (strip_padding(rows, self.special_tokens.padding) for rows in (inputs, targets))
        names = names or item_names("Pair", inputs)
        start = self._start_ids(add_start)
        inputs = [[*start, *row] for row in inputs]
        limits = self._inference.length_limits
        truncated = limits.truncate_inputs(inputs, targets, max_length, names, self._protected_prefixes(start))
        log_prob, is_greedy = self._inference.score(self.params, truncated, targets, batch_size=batch_size)
        return TargetScores(
            log_prob=log_prob,
            is_greedy=is_greedy,
            tokens=np.array([len(target) for target in targets], int),
            characters=characters,
            cut=np.array([len(a) - len(b) for a, b in zip(inputs, truncated, strict=True)], int),
        )

    def truncate_prompts(
        self,
        prompts,
        max_tokens: int | Sequence[int],
        max_length: int | None,
        names: Sequence[str],
        add_start: bool = True,
    ) -> tuple[list[list[int]], list[int]]:
        """Returns (token ids of prompts as `generate` reads them, number of tokens truncated from each).

        Raises:
          UserError: for a prompt that cannot be read. The message has its name.
        """
        start = self._start_ids(add_start)
        whole = [[*start, *self._texts.encode_input(prompt)] for prompt in prompts]
        limits = resolve_max_tokens(max_tokens, len(whole))
        prefixes = self._protected_prefixes(start)
        ids = self._inference.length_limits.truncate_prompts(whole, limits, max_length, names, prefixes)
        return ids, [len(a) - len(b) for a, b in zip(whole, ids, strict=True)]

    def classify(self, texts: Sequence[Any], *, batch_size: int = 32, names: Sequence[str] | None = None) -> list[Any]:
        """Returns labels and probabilities of the classification head.

        Args:
          texts: each a text; or the texts of the task's segments, followed by the list of choices if there are any:
            ("premise", "hypothesis"), ("context", ["one ending", "another"]); or the fields of a record.
          batch_size: texts per batch.
          names: names of the texts in messages.

        Returns:
          One `t5x_lab.evaluation.classification.ClassPrediction` per text, with `label` and `probabilities`.

        Raises:
          UserError: for a model without a head, or a wrong number of texts.
        """
        self._check_not_ensemble("classify")
        head = require_head(self.network)
        if isinstance(texts, str):
            raise UserError("classify takes a list of texts. For a single text write [text].")
        from t5x_lab.evaluation.classification import predict_classes  # needs TensorFlow

        sequences = encode_segments(self, texts, names or item_names("Text", texts))
        return predict_classes(self.class_logits(sequences, batch_size=batch_size), head)

    def class_logits(self, examples: Sequence[Sequence[Ids]], *, batch_size: int = 32) -> np.ndarray:
        """Returns the logits of the classes, float32 [N, C], for the token ids of examples' sequences."""
        return class_logits(self, examples, batch_size)

    def logits(self, **features) -> np.ndarray:
        """Returns teacher-forced logits, float32 [B, T, V], for SeqIO model features such as `decoder_input_tokens`."""
        batch = {name: np.asarray(x) for name, x in features.items()}
        network = self.network
        required = ["decoder_input_tokens"] * has_decoder(network) + ["encoder_input_tokens"] * has_encoder(network)
        missing = [name for name in required if name not in batch]
        if missing:
            raise UserError(f"logits needs {missing[0]} for a model of architecture {network.architecture}.")
        context = f"The network fails on the features {', '.join(batch)}"
        return np.asarray(call_user_code(context, lambda: self.sharded.logits(self.params, batch)))

    def loss(self, batch: dict) -> dict[str, float]:
        """Returns the batch's `loss` and `z_loss`, averaged by loss weights, and `weight_sum`, the sum of the weights."""
        targets = f"{'decoder' if has_decoder(self.network) else 'encoder'}_target_tokens"
        if targets not in batch:
            raise UserError(f"loss needs {targets} in the batch, in addition to the features that logits needs.")
        sums = self.sharded.loss(self.params, {name: np.asarray(x) for name, x in batch.items()})
        means = per_token(sums)
        return {"loss": float(means["loss"]), "z_loss": float(means["z_loss"]), "weight_sum": float(sums.weights)}

    # ---- saving, and models derived from this one

    def save(self, directory: str) -> None:
        """Writes configuration and parameters as a run directory that `t5x_lab.load` reads."""
        if isinstance(self.network, Ensemble):
            raise UserError("An ensemble cannot be saved as one model. Save its members.")
        save_run(directory, self.config.text, self.params, self.step)
        remember(self.config.text)

    def with_params(self, params: Params, step: int) -> Self:
        """Returns the same model with other parameters. Both share their compiled functions."""
        other = copy.copy(self)
        other.params, other.step = params, step
        return other

    def with_adapter(self, directory: str, step: int | None = None, trust: bool = False) -> Self:
        """Returns this model, as the base, with the PEFT parameters of a run. Both share the base's arrays.

        Args:
          directory: a run directory, or one of `save_adapter`.
          step: step of the run. Default: the latest.
          trust: see `t5x_lab.load`.

        Raises:
          UserError: if the run has another base model, or its configuration is not trusted.
        """
        self._check_not_ensemble("with_adapter")
        return peft.with_adapter(self, directory, step, trust)

    def save_adapter(self, directory: str) -> None:
        """Writes the PEFT parameters, without the base, as a run directory that `with_adapter` reads."""
        self._check_not_ensemble("save_adapter")
        peft.save_adapter(self, directory)

    def with_peft(self, directory: str) -> Self:
        """Returns this model, as the base, with LoRA that Hugging Face's `peft` saved for it. Both share the base's arrays.

        Raises:
          UserError: if it is not LoRA, or has another base model.
        """
        self._check_not_ensemble("with_peft")
        return peft.with_peft(self, directory)

    def save_peft(self, directory: str, base: str = "") -> None:
        """Writes the LoRA of this model in the format of `peft`. `base` is the base model's name in its configuration."""
        self._check_not_ensemble("save_peft")
        peft.save_peft(self, directory, base)

    def merged(self) -> Self:
        """Returns the model with its PEFT parameters merged into its own, which can be saved and converted.

        Raises:
          UserError: for a PEFT method that cannot be merged, such as adapter layers.
        """
        self._check_not_ensemble("merged")
        return peft.merged(self)

    def with_added(self, directory: str, step: int | None = None) -> Self:
        """Old name of `with_adapter`."""
        log("Run.with_added is now Run.with_adapter. The old name will stop working in the next release.")
        return self.with_adapter(directory, step)

    def save_added(self, directory: str) -> None:
        """Old name of `save_adapter`."""
        log("Run.save_added is now Run.save_adapter. The old name will stop working in the next release.")
        self.save_adapter(directory)

    def make_variant(self, config: GinConfig) -> Self:
        """Returns a model of another configuration on the same mesh, without parameters.

        Equal models share compiled functions.
        """
        vocabulary = config.vocabulary_if_set()
        key = str((config.model(), config.special_tokens(), vocabulary, vocabulary and config.input_vocabulary()))
        if key not in self._variants:
            self._variants[key] = type(self)(config, self.shard_variant(config), {}, 0)
        variant: Any = copy.copy(self._variants[key])
        variant.config, variant.resolved = config, {}
        return variant

    def shard_variant(self, config: GinConfig) -> ShardedModel:
        """Returns the model of another configuration on the same mesh."""
        devices = list(self.sharded.mesh.devices.flat)
        mesh, dtype = self.sharded.mesh_shape, self.sharded.parameter_dtype
        return ShardedModel(config.model(), mesh, devices, config.sharding(), dtype)

    # ---- internals

    def _eos_of(self, vocabulary: str) -> int | None:
        """Returns the EOS token of `vocabulary` or `input_vocabulary`, None if it has none or is not set."""
        try:
            return getattr(self, vocabulary).eos_id
        except NotSet:  # a model of token ids
            return None

    @property
    def _inference(self) -> Inference:
        if not self._inference_cache:
            start = self.special_tokens.start
            if start is None and self.has_encoder:
                raise UserError("SpecialTokens.start is None, but an encoder-decoder needs a start token. T5's is 0.")
            self._model.check_start(start)
            self._inference_cache.append(Inference(self.sharded, start or 0))
        return self._inference_cache[0]

    @functools.cached_property
    def _texts(self) -> Texts:
        vocabularies = self.vocabulary, self.input_vocabulary
        return Texts(*vocabularies, self.has_encoder, self.stop_ids, self.eos_id, lambda: self.input_affixes)

    def _start_ids(self, add_start: bool) -> list[int]:
        """Returns the start token of a decoder-only model as a list, empty if it has none."""
        start = self.special_tokens.start
        return [] if self.has_encoder or start is None or not add_start else [start]

    def _protected_prefixes(self, start: Ids) -> list[Ids]:
        """Returns prefixes that truncation from the left keeps: the soft prompt after the start token, or the start token."""
        prompt = self.soft_prompt
        return [[*self._start_ids(True), *prompt], start] if prompt else [start]

    def _truncate_ids(self, prompts, limits: list[int]) -> list[Ids]:
        start = self._start_ids(True)
        ids = [[*start, *row] for row in strip_padding(prompts, self.special_tokens.padding)]
        names, prefixes = item_names("Prompt", prompts), self._protected_prefixes(start)
        return self._inference.length_limits.truncate_prompts(ids, limits, None, names, prefixes)

    def _check_decoder(self, function: str) -> None:
        if not has_decoder(self.network):
            raise UserError(
                f"{function} needs a decoder. An encoder-only model predicts masked tokens in place. Use its logits, or "
                "train a decoder or an encoder-decoder."
            )

    def _check_can_generate(self, function: str) -> None:
        self._check_decoder(function)
        self._model.check_can_generate(function)

    def _check_not_ensemble(self, function: str) -> None:
        if isinstance(self.network, Ensemble):
            raise UserError(f"{function} needs a single model, and this is an ensemble. Load one of its members.")


@dataclasses.dataclass(frozen=True)
class TargetScores:
    """Scores of B targets, and their lengths.

    Attributes:
      log_prob: sum of the log-probabilities of the target tokens, float32 [B].
      is_greedy: whether greedy decoding gives the target, bool [B].
      tokens: number of scored tokens, EOS included if it was added, int [B].
      characters: number of characters of the target text, int [B]. None for token ids.
      cut: number of tokens truncated from the left of the inputs, int [B].
    """

    log_prob: np.ndarray
    is_greedy: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray | None
    cut: np.ndarray
