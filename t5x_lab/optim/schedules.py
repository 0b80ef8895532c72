"""Learning-rate schedules: products of T5X's factors, and linear, cosine and warmup-stable-decay schedules."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError, check_choice


class Schedule(Protocol):
    """A learning-rate schedule: a function of the step that JAX can trace."""

    def __call__(self, step: jax.Array) -> jax.Array:
        """Returns the learning rate, a float32 scalar, for the number of previous steps, int32."""


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """T5X's schedule: the product of factors of the step n, counted from `step_offset`.

    Factors, with w = warmup_steps:
      constant                 base_learning_rate
      linear_warmup            min(1, n / w)
      linear_decay             base_learning_rate * min(n / w, 1 + decay_factor * (w - n))
      rsqrt_decay              1 / sqrt(max(n, w))            (Raffel et al., section 3.1.2)
      rsqrt_normalized_decay   sqrt(w) / sqrt(max(n, w))
      decay_every              decay_factor ** (n // steps_per_decay)
      cosine_decay             (1 + cos(pi * p)) / 2, p = fraction of (max(n - w, 0) / steps_per_cycle)

    Attributes:
      factors: names of factors, separated by "*".
      base_learning_rate: factor `constant`.
      warmup_steps: w.
      decay_factor: decrease per step in linear_decay, factor per decay in decay_every.
      steps_per_decay: steps between decays in decay_every.
      steps_per_cycle: period of the cosine.
      step_offset: step that counts as 0.
      min_learning_rate: lower bound of the learning rate.
    """

    factors: str = "constant * rsqrt_decay"
    base_learning_rate: float = 1.0
    warmup_steps: int = 10_000
    decay_factor: float = 0.5
    steps_per_decay: int = 20_000
    steps_per_cycle: int = 100_000
    step_offset: int = 0
    min_learning_rate: float = 1e-8

    def __post_init__(self):
        check_types(self)
        check_positive(self, "steps_per_decay", "steps_per_cycle")
        check_range(self, "base_learning_rate", 0.0, math.inf)
        for name in self.names:
            check_choice("A factor of LearningRate.factors", name, FACTORS)
        if self.warmup_steps <= 0 and any("constant" not in name and "every" not in name for name in self.names):
            raise UserError(f"LearningRate.warmup_steps is {self.warmup_steps}. These factors need at least 1.")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.factors.split("*")]

    def __call__(self, step) -> jnp.ndarray:
        """Returns the learning rate, a float32 scalar, of a step counted from 0."""
        n = jnp.maximum(0, step - self.step_offset).astype(jnp.float32)
        rate = jnp.float32(1.0)
        for name in self.names:
            rate *= FACTORS[name](self, n)
        return jnp.maximum(rate, self.min_learning_rate).astype(jnp.float32)


FACTORS: dict[str, Callable] = {
    "constant": lambda c, n: c.base_learning_rate,
    "linear_warmup": lambda c, n: jnp.minimum(1.0, n / c.warmup_steps),
    "linear_decay": lambda c, n: (
        c.base_learning_rate * jnp.minimum(n / c.warmup_steps, 1.0 + c.decay_factor * (c.warmup_steps - n))
    ),
    "rsqrt_decay": lambda c, n: 1.0 / jnp.sqrt(jnp.maximum(n, c.warmup_steps)),
    "rsqrt_normalized_decay": lambda c, n: jnp.sqrt(c.warmup_steps / jnp.maximum(n, c.warmup_steps)),
    "decay_every": lambda c, n: c.decay_factor ** (n // c.steps_per_decay),
    "cosine_decay": lambda c, n: (
        0.5 * (1.0 + jnp.cos(jnp.pi * (jnp.maximum(0.0, (n - c.warmup_steps) / c.steps_per_cycle) % 1.0)))
    ),
}


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Base class of schedules with a linear warm-up from 0 to `peak` that reach `floor` at `total_steps`.

    Attributes:
      peak, floor: maximum and final learning rate.
      warmup_steps: length of the warm-up, at least 0.
      total_steps: step at which `floor` is reached, usually %TRAIN_STEPS. The rate stays there.
      step_offset: step that counts as 0.
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    floor: float = 0.0
    step_offset: int = 0

    def __post_init__(self):
        check_types(self)
        name = type(self).__name__
        check_positive(self, "peak", "total_steps")
        check_range(self, "floor", 0.0, math.inf)
        if not 0 <= self.warmup_steps < self.total_steps:
            raise UserError(
                f"{name}.warmup_steps is {self.warmup_steps}. It must be at least 0 and below total_steps, which is "
                f"{self.total_steps}."
            )

    def __call__(self, step) -> jax.Array:
        n = jnp.maximum(0, step - self.step_offset).astype(jnp.float32)
        decay = self._decay((n - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        rate = self.floor + (self.peak - self.floor) * decay
        return jnp.where(n < self.warmup_steps, self.peak * n / max(self.warmup_steps, 1), rate).astype(jnp.float32)

    def _decay(self, progress: jax.Array) -> jax.Array:
        """Returns a factor from 1 to 0 for the progress after the warm-up, which may exceed 1."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearDecay(_Shape):
    """Linear warm-up, then linear decay to `floor`."""

    def _decay(self, progress):
        return 1.0 - jnp.minimum(progress, 1.0)


@dataclasses.dataclass(frozen=True)
class WarmupLinear:
    """GPT-1's fine-tuning schedule: linear decay from the first step, times a linear warm-up.

    With the progress x and warm-up fraction w: peak * min(x / w, 1) * (1 - x) (Radford et al. 2018, section 4.1, and opt.py of
    their code).

    Attributes:
      peak: maximum learning rate.
      total_steps: step at which the rate is 0, usually %TRAIN_STEPS.
      warmup: w, a fraction of the steps. 0 = no warm-up.
    """

    peak: float
    total_steps: int
    warmup: float = 0.002

    def __post_init__(self):
        check_types(self)
        check_positive(self, "peak", "total_steps")
        check_range(self, "warmup", 0.0, 1.0)

    def __call__(self, step) -> jax.Array:
        x = jnp.minimum(step / self.total_steps, 1.0)
        warmup = jnp.minimum(x / self.warmup, 1.0) if self.warmup else 1.0
        return (self.peak * warmup * (1.0 - x)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class CosineDecay(_Shape):
    """Linear warm-up, then cosine decay to `floor` (Loshchilov & Hutter 2017, without restarts)."""

    def _decay(self, progress):
        return 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(progress, 1.0)))


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay(_Shape):
    """Linear warm-up, constant peak, and decay in the last `decay_steps` (WSD; Hu et al. 2024; Hägele et al. 2024).

    Attributes:
      decay_steps: length of the decay.
      decay: "linear", or "sqrt": 1 - sqrt(progress of the decay).
    """

    decay_steps: int = dataclasses.field(kw_only=True)
    decay: str = "linear"

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "decay_steps")
        check_choice("WarmupStableDecay.decay", self.decay, ("linear", "sqrt"))
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise UserError(
                f"WarmupStableDecay.warmup_steps and decay_steps are {self.warmup_steps} and {self.decay_steps}. Their sum "
                f"must not exceed total_steps, which is {self.total_steps}."
            )

    def _decay(self, progress):
        after_warmup = self.total_steps - self.warmup_steps
        decayed = jnp.clip((progress * after_warmup - (after_warmup - self.decay_steps)) / self.decay_steps, 0.0, 1.0)
        return 1.0 - (decayed if self.decay == "linear" else jnp.sqrt(decayed))
