"""A model with its parameters and vocabulary, in Python: generate, score, logits, loss."""

import copy
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from t5x_lab.checkpoints import t5x
from t5x_lab.checkpoints.layout import read_info, rooted
from t5x_lab.checkpoints.loading import load_params
from t5x_lab.checkpoints.manager import save_params
from t5x_lab.checkpoints.sources import find
from t5x_lab.config.errors import UserError
from t5x_lab.data.environment import check_environment
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.models.model import Params
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.assemble import Placed
from t5x_lab.runs.carried_config import config_of
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.inference import Inference
from t5x_lab.training.step import per_token


def load(model_dir: str, step: int | None = None, mesh: str | None = None) -> "Run":
    """The model of a run directory, at its latest checkpoint or at `step`; or of a directory of Hugging Face's.

    Args:
      model_dir: a directory that `t5x_lab train`, `Run.save` or `t5x_lab convert` wrote, or `transformers` saved.
      step: a checkpoint's step.
      mesh: devices to spread it over, such as "fsdp=8"; by default the first device alone, or where several processes work as
        one the run's own MESH. All of them then make the same calls, and get the same answers.
    """
    return _run(config_of(find(model_dir, step)), checkpoint=model_dir, step=step, mesh=mesh)


def from_gin(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    seed: int = 0,
    checkpoint: str | None = None,
    step: int | None = None,
    mesh: str | None = None,
) -> "Run":
    """A model from gin files, with fresh parameters or those of a checkpoint.

    Args:
      files: at least a model file, such as "models/t5_1_1/small.gin".
      bindings: gin bindings, such as "DROPOUT_RATE = 0.0".
      seed: of fresh parameters.
      checkpoint: a run directory, or a checkpoint of t5x_lab, T5X or Hugging Face.
      step: which checkpoint of a run directory; the latest by default.
      mesh: see `load`.
    """
    files, bindings = ([x] if isinstance(x, str) else x for x in (files, bindings))
    return _run(GinConfig(tuple(map(str, files)), tuple(bindings)), seed=seed, checkpoint=checkpoint, step=step, mesh=mesh)


def _run(config: GinConfig, *, seed: int = 0, checkpoint: str | None, step: int | None, mesh: str | None) -> "Run":
    together = mesh is None and jax.process_count() > 1
    shape = config.mesh() if together else MeshShape.parse(mesh or "data=1")
    sizes = (shape.data, shape.fsdp, shape.tensor, shape.replica or 1)
    devices = jax.devices() if -1 in sizes or jax.process_count() > 1 else jax.devices()[: int(np.prod(sizes))]
    placed = Placed(config.model(), shape, devices)
    if checkpoint is None:
        return Run(config, placed, placed.init_params(seed), step=0)
    place = find(checkpoint, step)
    params = load_params(place, placed.abstract_params, placed.model.axes)
    step = read_info(place.path)["step"] if place.format == "t5x_lab" else t5x.step_in(place.path.name)
    return Run(config, placed, params, step=step or 0)


class Run:
    """A model that can be asked.

    Attributes:
      params: nested dict of arrays, logical names.
      num_parameters: their number.
      mesh: the devices they are on.
      step: of the checkpoint they came from.
    """

    def __init__(self, config: GinConfig, placed: Placed, params: Params, step: int):
        self.config, self.params, self.step = config, params, step
        self._placed, self._model = placed, placed.model
        self.num_parameters = placed.model.num_parameters
        self.mesh = placed.mesh

    @functools.cached_property
    def vocabulary(self):
        """The SeqIO vocabulary of the configuration."""
        check_environment()
        from t5x_lab.data.vocabularies import build_vocabulary

        return build_vocabulary(self.config.vocabulary())

    @property
    def has_encoder(self) -> bool:
        """Whether inputs go into an encoder; else they come before what is written or scored."""
        return self._model.config.network.has_encoder

    @property
    def most_positions(self) -> int | None:
        """Tokens that the model can tell the positions of; None where nothing limits them."""
        return self._inference.most_positions

    @functools.cached_property
    def input_eos(self) -> bool:
        """Whether the run's task ends its inputs with an end token, and so text given as inputs is too."""
        try:
            data = self.config.data()
        except UserError:
            return False  # a model without a task
        check_environment()
        from t5x_lab.data.tasks import get_mixture_or_task

        return get_mixture_or_task(data, self._model.config.network.architecture).input_eos

    @functools.cached_property
    def _inference(self) -> Inference:
        return Inference(self._placed)

    def with_params(self, params: Params, step: int) -> "Run":
        """The same model with other parameters, and the programs that were compiled for it."""
        other = copy.copy(self)
        other._inference, other.params, other.step = self._inference, params, step
        return other

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
        beam_alpha: float = 0.6,
        stop: Sequence[str] = (),
        streams: Sequence[int] | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
    ) -> list[list[str]]:
        """Completes each prompt `num_samples` times; greedy at temperature 0. See `SamplingConfig`.

        With a `beam_size` above 1 the `num_samples` best hypotheses of a beam search are returned; see `BeamConfig`.

        Args:
          prompts: any number of texts of any lengths; or token ids, taken as they are.
          max_tokens: most tokens to write, for all prompts or for each.
          seed: of everything drawn, below 2**32.
          stop: a completion ends before the first of these texts that it would contain.
          streams: which of the seed's streams of random numbers each prompt draws from; by default its own number's.
          max_length: prompts are cut from the left, so that an encoder reads no more tokens than this, or a decoder no more
            with those that it writes.
          batch_size: texts that are written at a time; a finished one makes room for the next.

        Returns:
          one list a prompt, of `num_samples` strings without the prompt.
        """
        self._check_decoder("generate")
        _check_texts("generate", prompts)
        _check_texts("generate", stop, "stop")
        if num_samples < 1:
            raise UserError(f"num_samples is {num_samples}; it must be at least 1.")
        if "" in stop:
            raise UserError("stop holds an empty text, which every text contains; leave it out.")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed is {seed}; it must be at least 0 and below 2**32.")
        if streams is not None and len(streams) != len(prompts):
            raise UserError(f"streams has {len(streams)} numbers for {len(prompts)} prompts; give one for each.")
        if len(prompts) == 0:
            return []
        limits = _limits(max_tokens, len(prompts))
        ids, _ = self.fit_prompts(prompts, limits, max_length, _names("Prompt", prompts))
        eos_id = self.vocabulary.eos_id
        if beam_size != 1:
            beams = BeamConfig(beam_size, beam_alpha)
            if temperature or num_samples > beam_size or len(set(limits)) > 1:
                raise UserError(
                    f"beam_size is {beam_size}, which does not go with temperature {temperature}, num_samples {num_samples} "
                    "or a limit for each prompt: a beam search draws nothing, finds no more than beam_size texts, and writes "
                    "all of them to the same length."
                )
            found, _ = self._inference.search(
                self.params, ids, max_tokens=limits[0], beams=beams, eos_id=eos_id, batch_size=batch_size
            )
            hypotheses = zip(ids, found[:, :num_samples], strict=True)
            return [[_before(self._continuation(prompt, row), stop) for row in rows] for prompt, rows in hypotheses]
        several = lambda values: [value for value in values for _ in range(num_samples)]
        ids, limits = several(ids), several(limits)
        firsts = range(len(prompts)) if streams is None else streams
        streams = [stream * num_samples + sample for stream in firsts for sample in range(num_samples)]
        text_of = lambda i, tokens: self._continuation(ids[i], tokens)
        written = self._inference.generate(
            self.params,
            ids,
            limits=limits,
            eos_id=eos_id,
            sampling=SamplingConfig(temperature, top_k, top_p),
            seed=seed,
            streams=streams,
            is_stopped=(lambda i, tokens: any(end in text_of(i, tokens) for end in stop)) if stop else None,
            batch_size=batch_size,
        )
        texts = {i: _before(text_of(i, tokens), stop) for i, tokens, _ in written}
        return [[texts[i + j] for j in range(num_samples)] for i in range(0, len(ids), num_samples)]

    def generate_tokens(
        self, prompts, *, max_tokens: int, sampling: SamplingConfig = SamplingConfig(), seed: int = 0, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Completes token ids: an array int [B, P], 0 = padding on the right, or lists of them.

        Returns:
          (tokens int32 [B, max_tokens], 0 after the end token; log-probability of each, float32)
        """
        self._check_decoder("generate_tokens")
        texts, limits = _without_padding(prompts), _limits(max_tokens, len(prompts))
        texts = self._inference.fit_prompts(texts, limits, None, _names("Prompt", texts))
        tokens = np.zeros((len(prompts), max_tokens), np.int32)
        log_probs = np.zeros(tokens.shape, np.float32)
        written = self._inference.generate(
            self.params,
            texts,
            limits=limits,
            eos_id=self.vocabulary.eos_id,
            sampling=sampling,
            seed=seed,
            batch_size=batch_size,
        )
        for i, text, logs in written:
            tokens[i, : len(text)], log_probs[i, : len(text)] = text, logs
        return tokens, log_probs

    def search_tokens(
        self, prompts, *, max_tokens: int, beams: BeamConfig = BeamConfig(), batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches completions of token ids: an array int [B, P], 0 = padding on the right, or lists of them.

        Returns:
          (tokens int32 [B, beam size, max_tokens], 0 after the end token; scores float32 [B, beam size]), best first
        """
        self._check_decoder("search_tokens")
        texts = _without_padding(prompts)
        texts = self._inference.fit_prompts(texts, _limits(max_tokens, len(texts)), None, _names("Prompt", texts))
        options = dict(max_tokens=max_tokens, beams=beams, eos_id=self.vocabulary.eos_id, batch_size=batch_size)
        return self._inference.search(self.params, texts, **options)

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
        batch_size: int = 32,
        names: Sequence[str] | None = None,
    ) -> "TargetScores":
        """What the model gives to each target after its inputs. Targets of the same inputs share the reading of them.

        Args:
          inputs, targets: lists of strings; or integer arrays [B, K] and [B, T], or lists of ids, taken as they are, 0 =
            padding. Inputs that do not fit are cut from the left.
          eos: whether an end token is added to target strings and scored with them.
          max_length: an encoder reads no more tokens than this, or a decoder no more with those of the target.
          batch_size: targets that are scored at a time.
          names: what messages call the pairs.

        Raises:
          UserError: for a target that does not fit by itself.
        """
        self._check_decoder("score")
        for texts in (inputs, targets):
            _check_texts("score", texts)
        if len(inputs) != len(targets):
            raise UserError(f"score was given {len(inputs)} inputs and {len(targets)} targets; give one target for each input.")
        characters = None
        if len({isinstance(text, str) for text in (*inputs, *targets)}) > 1:
            raise UserError("score was given texts and token ids together; give inputs and targets of one kind.")
        if len(inputs) and isinstance(targets[0], str):
            characters = np.array([len(text) for text in targets])
            encoded = {text: self._encode(text, self.input_eos) for text in set(inputs)}
            inputs, targets = [encoded[text] for text in inputs], [self._encode(text, eos) for text in targets]
        else:
            inputs, targets = _without_padding(inputs), _without_padding(targets)
        fitting = self._inference.fit_inputs(inputs, targets, max_length, names or _names("Pair", inputs))
        log_prob, is_greedy = self._inference.score(self.params, fitting, targets, batch_size=batch_size)
        return TargetScores(
            log_prob=log_prob,
            is_greedy=is_greedy,
            tokens=np.array([len(target) for target in targets], int),
            characters=characters,
            cut=np.array([len(a) - len(b) for a, b in zip(inputs, fitting, strict=True)], int),
        )

    def fit_prompts(
        self, prompts, max_tokens: int | Sequence[int], max_length: int | None, names: Sequence[str]
    ) -> tuple[list[list[int]], list[int]]:
        """Token ids of prompts as `generate` reads them, and how many it cuts from the left of each.

        Raises:
          UserError: for a prompt that cannot be read, by its name.
        """
        whole = [self._prompt_ids(prompt) for prompt in prompts]
        ids = self._inference.fit_prompts(whole, _limits(max_tokens, len(whole)), max_length, names)
        return ids, [len(a) - len(b) for a, b in zip(whole, ids, strict=True)]

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        return self._encode(prompt, self.input_eos) if isinstance(prompt, str) else [int(i) for i in prompt if i]

    def logits(self, **features) -> np.ndarray:
        """Teacher-forced logits, float32 [B, T, V], of SeqIO model features (`decoder_input_tokens`, …)."""
        batch = {name: np.asarray(x) for name, x in features.items()}
        network = self._model.config.network
        needed = ["decoder_input_tokens"] * network.has_decoder + ["encoder_input_tokens"] * network.has_encoder
        missing = [name for name in needed if name not in batch]
        if missing:
            raise UserError(f"logits needs {missing[0]} for a model of architecture {network.architecture}.")
        return np.asarray(self._logits(self.params, batch))

    @functools.cached_property
    def _logits(self):
        return jax.jit(self._model.logits, out_shardings=self._placed.replicated)

    def loss(self, batch: dict) -> dict[str, float]:
        """`loss` (cross-entropy per token with loss), `z_loss` (the same for z-loss) and `weight_sum` of a batch."""
        targets = f"{'decoder' if self._model.config.network.has_decoder else 'encoder'}_target_tokens"
        if targets not in batch:
            raise UserError(f"loss needs {targets} in the batch, besides what logits needs.")
        sums = self._loss(self.params, {name: np.asarray(x) for name, x in batch.items()})
        means = per_token(sums)
        return {"loss": float(means["loss"]), "z_loss": float(means["z_loss"]), "weight_sum": float(sums.weights)}

    @functools.cached_property
    def _loss(self):
        return jax.jit(self._model.loss, out_shardings=self._placed.replicated)

    def save(self, directory: str) -> None:
        """Writes a run directory that `t5x_lab.load` reads: the configuration and the parameters."""
        root = rooted(directory)
        if (root / "checkpoints" / str(self.step)).exists():
            raise UserError(f"{directory} holds a checkpoint of step {self.step} already, and nothing is ever overwritten.")
        root.mkdir(parents=True, exist_ok=True)
        (root / "config.gin").write_text(self.config.text)
        save_params(root / "checkpoints" / str(self.step), self.params, self.step, config=self.config.text)

    def _check_decoder(self, function: str) -> None:
        if not self._model.config.network.has_decoder:
            raise UserError(
                f"{function} needs a model that writes one token after the other; an encoder alone predicts masked tokens in "
                "place. Use its logits, or train a decoder or an encoder-decoder."
            )

    def _encode(self, text: str, eos: bool) -> list[int]:
        return list(self.vocabulary.encode(text)) + [self.vocabulary.eos_id] * eos

    def _continuation(self, prompt: list[int], tokens: np.ndarray) -> str:
        """The text of new tokens. A decoder's make one text with the prompt, which shows whether a space comes between."""
        eos_id = self.vocabulary.eos_id
        ids = [int(token) for token in tokens if token not in (0, eos_id)]
        text = self.vocabulary.decode(ids)
        if not self.has_encoder and prompt and prompt[-1] != eos_id:
            running = [token for token in prompt if token != eos_id]  # SeqIO's decode would stop there
            before, whole = self.vocabulary.decode(running), self.vocabulary.decode(running + ids)
            if whole.startswith(before):
                text = whole[len(before) :]
        return text


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


def _check_texts(function: str, texts, name: str = "lists of strings") -> None:
    if isinstance(texts, str):
        raise UserError(f"{function} takes {name} as a list; write [{texts[:20]!r}] for a single one.")


def _without_padding(rows) -> list[list[int]]:
    return [[int(i) for i in row if i] for row in rows]


def _limits(max_tokens, number: int) -> list[int]:
    limits = [int(max_tokens)] * number if np.ndim(max_tokens) == 0 else list(max_tokens)
    if len(limits) != number:
        raise UserError(f"max_tokens has {len(limits)} numbers for {number} prompts; give one number, or one for each.")
    if min(limits, default=1) < 1:
        raise UserError(f"max_tokens is {min(limits)}; it must be at least 1.")
    return limits


def _names(kind: str, texts: Sequence) -> list[str]:
    return [f"{kind} {number}" for number in range(len(texts))]


def _before(text: str, ends: Sequence[str]) -> str:
    """The text up to the first of the ends in it."""
    return text[: min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))]
