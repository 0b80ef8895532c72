"""Learning-rate schedules: any function of the step; products of T5X's factors, and the usual shapes over a known length."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError, check_choice


@runtime_checkable
class Schedule(Protocol):
    """The learning rate of a step: any function of it that JAX can trace."""

    def __call__(self, step: jax.Array) -> jax.Array:
        """A float32 scalar, of the number of steps done before this one, int32."""


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """`base_learning_rate` and factors of the step n, counted from `step_offset`, multiplied together.

    Factors, with w = warmup_steps:
      constant                 base_learning_rate
      linear_warmup            min(1, n / w)
      linear_decay             base_learning_rate * min(n / w, 1 + decay_factor * (w - n))
      rsqrt_decay              1 / sqrt(max(n, w))            (Raffel et al., section 3.1.2)
      rsqrt_normalized_decay   sqrt(w) / sqrt(max(n, w))
      decay_every              decay_factor ** (n // steps_per_decay)
      cosine_decay             (1 + cos(pi * p)) / 2, p = fraction of (max(n - w, 0) / steps_per_cycle)

    Attributes:
      factors: names of these, with "*" between them.
      base_learning_rate: see above.
      warmup_steps: w.
      decay_factor: what is taken off at each step of linear_decay, or multiplied by at each of decay_every.
      steps_per_decay: between two decays of decay_every.
      steps_per_cycle: of the cosine.
      step_offset: the step that counts as the first.
      min_learning_rate: the result is never below it.
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
            raise UserError(f"LearningRate.warmup_steps is {self.warmup_steps}; these factors need at least 1.")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.factors.split("*")]

    def __call__(self, step) -> jnp.ndarray:
        """The learning rate, a float32 scalar, of a step counted from 0."""
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
    """A schedule that rises linearly from 0 to `peak` over `warmup_steps` and ends at `floor` after `total_steps`.

    Attributes:
      peak, floor: learning rates.
      warmup_steps: may be 0.
      total_steps: at which the floor is reached; it stays there. Most often %TRAIN_STEPS.
      step_offset: the step that counts as 0.
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
                f"{name}.warmup_steps is {self.warmup_steps}; it must be at least 0 and below total_steps, which is "
                f"{self.total_steps}."
            )

    def __call__(self, step) -> jax.Array:
        n = jnp.maximum(0, step - self.step_offset).astype(jnp.float32)
        above = self._decay((n - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        after = self.floor + (self.peak - self.floor) * above
        return jnp.where(n < self.warmup_steps, self.peak * n / max(self.warmup_steps, 1), after).astype(jnp.float32)

    def _decay(self, part: jax.Array) -> jax.Array:
        """From 1 to 0, of the part of the steps after the warm-up that is done, which may exceed 1."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearDecay(_Shape):
    """Linear warm-up, then linear decay: to 0, or to `floor`."""

    def _decay(self, part):
        return 1.0 - jnp.minimum(part, 1.0)


@dataclasses.dataclass(frozen=True)
class WarmupLinear:
    """Linear decay from the first step on, times a linear warm-up over a share of the steps, as GPT-1's code fine-tunes.

    With x the part of the steps that is done and w the warm-up's, peak * min(x / w, 1) * (1 - x) (Radford et al. 2018, section
    4.1, and opt.py of their code).

    Attributes:
      peak: learning rate.
      total_steps: at which it is 0; most often %TRAIN_STEPS.
      warmup: w, a share of them; 0 for none.
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
        warm = jnp.minimum(x / self.warmup, 1.0) if self.warmup else 1.0
        return (self.peak * warm * (1.0 - x)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class CosineDecay(_Shape):
    """Linear warm-up, then half a cosine down to `floor` (Loshchilov & Hutter 2017, without restarts)."""

    def _decay(self, part):
        return 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(part, 1.0)))


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay(_Shape):
    """Linear warm-up, the peak, and a decay over the last `decay_steps` (Hu et al. 2024; Hägele et al. 2024).

    Attributes:
      decay_steps: of the decay.
      decay: "linear", or "sqrt": 1 - sqrt of the part of the decay that is done.
    """

    decay_steps: int = dataclasses.field(kw_only=True)
    decay: str = "linear"

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "decay_steps")
        check_choice("WarmupStableDecay.decay", self.decay, ("linear", "sqrt"))
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise UserError(
                f"WarmupStableDecay.warmup_steps and decay_steps are {self.warmup_steps} and {self.decay_steps}, together more "
                f"than total_steps, which is {self.total_steps}."
            )

    def _decay(self, part):
        after_warmup = self.total_steps - self.warmup_steps
        done = jnp.clip((part * after_warmup - (after_warmup - self.decay_steps)) / self.decay_steps, 0.0, 1.0)
        return 1.0 - (done if self.decay == "linear" else jnp.sqrt(done))
