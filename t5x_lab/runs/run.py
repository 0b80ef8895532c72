"""A model with its parameters and vocabulary, in Python: generate, score, logits, loss."""

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
from t5x_lab.decoding.beam_search import BeamConfig, search
from t5x_lab.decoding.sampling import SamplingConfig, generate
from t5x_lab.models.model import Params
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.assemble import Placed
from t5x_lab.runs.carried_config import config_of
from t5x_lab.runs.config import GinConfig
from t5x_lab.training.step import per_token

_LENGTH_MULTIPLE = 16  # lengths are padded to multiples of it, so that few programs are compiled


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

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        num_samples: int = 1,
        seed: int = 0,
        beam_size: int = 1,
        beam_alpha: float = 0.6,
    ) -> list[list[str]]:
        """Completes each prompt `num_samples` times; greedy at temperature 0. See `SamplingConfig`.

        With a `beam_size` above 1 the `num_samples` best hypotheses of a beam search are returned; see `BeamConfig`.

        Returns:
          one list a prompt, of `num_samples` strings without the prompt.
        """
        self._check_decoder("generate")
        _check_texts("generate", prompts)
        if num_samples < 1:
            raise UserError(f"num_samples is {num_samples}; it must be at least 1.")
        if not prompts:
            return []
        if beam_size != 1:
            if temperature or num_samples > beam_size:
                raise UserError(
                    f"beam_size is {beam_size}, which does not go with temperature {temperature} and num_samples "
                    f"{num_samples}: a beam search draws nothing, and finds no more than beam_size texts."
                )
            ids = [self._encode(prompt, self.input_eos) for prompt in prompts]
            beams = BeamConfig(beam_size, beam_alpha)
            found, _ = self.search_tokens(_pad(ids), max_tokens=max_tokens, beams=beams)
            hypotheses = zip(ids, found[:, :num_samples], strict=True)
            return [[self._continuation(prompt, row) for row in rows] for prompt, rows in hypotheses]
        rows = [self._encode(prompt, self.input_eos) for prompt in prompts for _ in range(num_samples)]
        tokens, _ = self.generate_tokens(
            _pad(rows), max_tokens=max_tokens, sampling=SamplingConfig(temperature, top_k, top_p), seed=seed
        )
        texts = [self._continuation(prompt, row) for prompt, row in zip(rows, tokens, strict=True)]
        return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]

    def generate_tokens(
        self, prompts: np.ndarray, *, max_tokens: int, sampling: SamplingConfig = SamplingConfig(), seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Completes token ids int [B, P], 0 = padding on the right.

        Returns:
          (tokens int32 [B, max_tokens], 0 after the end token; log-probability of each, float32)
        """
        self._check_decoder("generate_tokens")
        if max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}; it must be at least 1.")
        rows = _pad_rows(_pad(prompts), self._placed.row_multiple)
        out = self._generate(self.params, rows, np.uint32(seed), max_tokens, sampling, self.vocabulary.eos_id)
        tokens, log_probs = (np.asarray(x)[: len(prompts)] for x in out)
        return tokens, log_probs

    def search_tokens(
        self, prompts: np.ndarray, *, max_tokens: int, beams: BeamConfig = BeamConfig()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches completions of token ids int [B, P], 0 = padding on the right.

        Returns:
          (tokens int32 [B, beam size, max_tokens], 0 after the end token; scores float32 [B, beam size]), best first
        """
        self._check_decoder("search_tokens")
        if max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}; it must be at least 1.")
        rows = _pad_rows(_pad(prompts), self._placed.row_multiple)
        out = self._search(self.params, rows, max_tokens, beams, self.vocabulary.eos_id)
        tokens, scores = (np.asarray(x)[: len(prompts)] for x in out)
        return tokens, scores

    @functools.cached_property
    def _search(self):
        program = functools.partial(search, self._model)
        return jax.jit(program, static_argnames=("max_tokens", "config", "eos_id"), out_shardings=self._placed.replicated)

    @functools.cached_property
    def _generate(self):
        program = functools.partial(generate, self._model)
        return jax.jit(program, static_argnames=("max_tokens", "config", "eos_id"), out_shardings=self._placed.replicated)

    def score(self, inputs, targets, *, eos: bool = False) -> np.ndarray:
        """Sum of the log-probabilities of the target tokens, float32 [B]; no z-loss, no label smoothing.

        Args:
          inputs, targets: lists of strings; or integer arrays [B, K] and [B, T], taken as they are, 0 = padding.
          eos: whether an end token is added to target strings and scored with them.
        """
        self._check_decoder("score")
        for texts in (inputs, targets):
            _check_texts("score", texts)
        if len(inputs) != len(targets):
            raise UserError(f"score was given {len(inputs)} inputs and {len(targets)} targets; give one target for each input.")
        if len(inputs) == 0:
            return np.zeros((0,), np.float32)
        if isinstance(inputs[0], str):
            inputs = [self._encode(text, self.input_eos) for text in inputs]
            targets = [self._encode(text, eos) for text in targets]
        else:
            inputs, targets = ([[int(i) for i in row if i] for row in rows] for rows in (inputs, targets))
        batch = _pad_batch(scoring_batch(inputs, targets, self._model.config.network.has_encoder), self._placed)
        return np.asarray(self._score(self.params, batch))[: len(inputs)]

    @functools.cached_property
    def _score(self):
        return jax.jit(self._model.score, out_shardings=self._placed.replicated)

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
        ids = [int(token) for token in tokens if token not in (0, self.vocabulary.eos_id)]
        text = self.vocabulary.decode(ids)
        if not self._model.config.network.has_encoder:
            before, whole = self.vocabulary.decode(prompt), self.vocabulary.decode(prompt + ids)
            if whole.startswith(before):
                text = whole[len(before) :]
        return text


def _check_texts(function: str, texts) -> None:
    if isinstance(texts, str):
        raise UserError(f"{function} takes lists of strings; write [{texts[:20]!r}] for a single one.")


def scoring_batch(inputs: list[list[int]], targets: list[list[int]], has_encoder: bool) -> dict[str, np.ndarray]:
    """Model features that put loss on the targets alone: inputs into the encoder, or before them as a prefix."""
    if has_encoder:
        target_tokens = _pad(targets)
        return {
            "encoder_input_tokens": _pad(inputs),
            "decoder_input_tokens": np.pad(target_tokens, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": target_tokens,
        }
    tokens = _pad([i + t for i, t in zip(inputs, targets, strict=True)])
    position = np.arange(tokens.shape[1])
    prefix = np.array([len(row) for row in inputs])[:, None]
    return {
        "decoder_input_tokens": np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": ((position >= prefix) & (tokens > 0)).astype(np.int32),
        # One more than the prefix: inputs are shifted to the right by one.
        "decoder_causal_attention": (position <= prefix).astype(np.int32),
    }


def _pad(rows) -> np.ndarray:
    longest = max((len(row) for row in rows), default=0)
    length = max(-(-longest // _LENGTH_MULTIPLE), 1) * _LENGTH_MULTIPLE
    return np.array([np.pad(np.asarray(row, np.int32), (0, length - len(row))) for row in rows], np.int32)


def _pad_rows(x: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(x, [(0, -len(x) % multiple)] + [(0, 0)] * (x.ndim - 1))


def _pad_batch(batch: dict[str, np.ndarray], placed: Placed) -> dict[str, np.ndarray]:
    return {name: _pad_rows(x, placed.row_multiple) for name, x in batch.items()}
