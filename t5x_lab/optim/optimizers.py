"""The dataclasses behind gin's `OPTIMIZER`, each of which makes an optax transformation for a model's axes."""

import dataclasses

import jax
import optax

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import UserError
from t5x_lab.optim.adafactor import adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.rules import is_axes


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """T5X's Adafactor; see `t5x_lab.optim.adafactor`."""

    learning_rate: LearningRate = LearningRate()
    decay_rate: float = 0.8
    clipping_threshold: float | None = 1.0
    multiply_by_parameter_scale: bool = True
    min_dim_size_to_factor: int = 128
    momentum: float | None = None
    weight_decay: float | None = None

    def __post_init__(self):
        check_types(self)
        in_range(self, "momentum", 0.0, 1.0)
        positive(self, "clipping_threshold", "min_dim_size_to_factor")
        if not 0 < self.decay_rate < 1:
            raise UserError(f"Adafactor.decay_rate is {self.decay_rate}; it must lie between 0 and 1. T5 uses 0.8.")

    def make(self, axes: dict) -> optax.GradientTransformation:
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "learning_rate"}
        return adafactor(self.learning_rate, axes, **options)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019) with a clipped global norm; matrices decay, vectors (norm scales) do not."""

    learning_rate: LearningRate = LearningRate("constant * linear_warmup * cosine_decay", 1e-4, 1_000)
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_global_norm: float | None = 1.0

    def __post_init__(self):
        check_types(self)
        in_range(self, "b1", 0.0, 1.0)
        in_range(self, "b2", 0.0, 1.0)
        positive(self, "epsilon", "clip_global_norm")

    def make(self, axes: dict) -> optax.GradientTransformation:
        def decayed(params):
            rank = lambda names: len([name for name in names if name != "layers"])
            return jax.tree.map(lambda a, p: rank(a) > 1, axes, params, is_leaf=is_axes)

        clip = [] if self.clip_global_norm is None else [optax.clip_by_global_norm(self.clip_global_norm)]
        adamw = optax.adamw(self.learning_rate, self.b1, self.b2, self.epsilon, weight_decay=self.weight_decay, mask=decayed)
        return optax.chain(*clip, adamw)
