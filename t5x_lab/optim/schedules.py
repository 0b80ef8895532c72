"""Learning-rate schedules as a product of named factors, in T5X's vocabulary."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import UserError, one_of


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

    The result is never below `min_learning_rate`.
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
        positive(self, "steps_per_decay", "steps_per_cycle")
        in_range(self, "base_learning_rate", 0.0, math.inf)
        for name in self.names:
            one_of("A factor of LearningRate.factors", name, FACTORS)
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
