"""Optimizers that gin binds as OPTIMIZER: the protocol, T5X's Adafactor, and optax transformations as dataclasses."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.optim.adafactor import BATCH, UNFACTORED, adafactor
from t5x_lab.optim.schedules import LearningRate, Schedule
from t5x_lab.partitioning.rules import is_axes


class Optimizer(Protocol):
    """Makes an optax transformation for parameters with logical axes.

    A leaf of the optimizer state is sharded like the parameter whose path is a suffix of its own, if the ranks are equal. Other
    leaves are replicated.

    Attributes:
      learning_rate: schedule, used only for metrics. The transformation of `make` must apply it too.

    Optional members, as in `Groups`:
      learning_rates: schedules by group. The optimizer state is then a tuple of the groups' states.
      is_trained(name): False for a frozen parameter.
      check_names(names): checks the names of all parameters.
      gradient_point(state, params): parameters at which the gradient is computed, if not at the model's own.
      identity(): settings that a run must be resumed with.
    """

    learning_rate: Schedule

    def make(self, axes: dict) -> optax.GradientTransformation:
        """Makes the transformation, whose updates are added to the parameters.

        Args:
          axes: logical axes of the parameters, a tree of tuples of names. None = unnamed.
        """


def check_optimizer(config) -> None:
    """Calls `check_types`, with a specific message for a number instead of a schedule."""
    rate = config.learning_rate
    if isinstance(rate, int | float):
        raise UserError(
            f"{type(config).__name__}.learning_rate is {rate}. It must be a schedule. For a constant rate bind "
            f'@LearningRate(), LearningRate.factors = "constant" and LearningRate.base_learning_rate = {rate}.'
        )
    check_types(config)


def _check_momentum_dtype(config) -> None:
    check_choice(f"{type(config).__name__}.momentum_dtype", config.momentum_dtype, ("float32", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class Optax:
    """Any optax transformation as an `Optimizer`: `Optax(optax.lion(rate), rate)`."""

    transformation: optax.GradientTransformation
    learning_rate: Schedule

    def __post_init__(self):
        if isinstance(self.learning_rate, int | float):
            raise UserError(
                f"Optax has the learning rate {self.learning_rate}. It must be the schedule that the transformation uses: "
                "rate = lambda step: 0.01, then Optax(optax.lion(rate), rate)."
            )

    def make(self, axes: dict) -> optax.GradientTransformation:
        del axes
        return self.transformation


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """T5X's Adafactor (Shazeer & Stern 2018). See `t5x_lab.optim.adafactor`.

    Attributes:
      learning_rate: schedule.
      decay_rate: c in the decay of the second moment, 1 - n ** -c at step n.
      clipping_threshold: threshold of the root mean square of a parameter's update. None = no clipping.
      multiply_by_parameter_scale: multiply updates by the root mean square of the parameter.
      min_dim_size_to_factor: minimum size of both dimensions for a factored second moment.
      momentum: decay rate of the momentum. None = no momentum.
      momentum_dtype: dtype in which the momentum is stored, "float32" or "bfloat16".
      weight_decay: weight decay of all parameters, which the learning rate does not multiply. None = none.
      weight_decay_lr_exponent: e multiplies the weight decay, 1 if it is None, by learning_rate**e. None = no factor.
      clip_global_norm: maximum global norm of the gradient. None = no clipping.
      step_offset: step from which the decay of the second moment counts, such as the first one of a fine-tuning that has the
        step of its pre-training (`RestoreCheckpointConfig.carry`). The schedule does not depend on it.
    """

    learning_rate: Schedule = LearningRate()
    decay_rate: float = 0.8
    clipping_threshold: float | None = 1.0
    multiply_by_parameter_scale: bool = True
    min_dim_size_to_factor: int = 128
    momentum: float | None = None
    momentum_dtype: str = "float32"
    weight_decay: float | None = None
    weight_decay_lr_exponent: float | None = None
    clip_global_norm: float | None = None
    step_offset: int = 0

    def __post_init__(self):
        check_optimizer(self)
        _check_momentum_dtype(self)
        check_range(self, "momentum", 0.0, 1.0)
        check_positive(self, "clipping_threshold", "min_dim_size_to_factor", "clip_global_norm")
        if not 0 < self.decay_rate < 1:
            raise UserError(f"Adafactor.decay_rate is {self.decay_rate}. It must be between 0 and 1. T5 uses 0.8.")

    def make(self, axes: dict) -> optax.GradientTransformation:
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "learning_rate"}
        return adafactor(self.learning_rate, axes, **options)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019) with gradient clipping. Biases and norm scales have no weight decay.

    Attributes:
      learning_rate: schedule.
      b1, b2: decay rates of the first and second moment.
      epsilon: added to the square root of the second moment.
      weight_decay: weight decay of matrices, multiplied by the learning rate.
      clip_global_norm: maximum global norm of the gradient. None = no clipping.
      clip_value: maximum absolute value of each element of the gradient, before its norm. None = no clipping.
      momentum_dtype: dtype in which the first moment is stored, "float32" or "bfloat16".
    """

    learning_rate: Schedule = LearningRate("constant * linear_warmup * cosine_decay", 1e-4, 1_000)
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_global_norm: float | None = 1.0
    clip_value: float | None = None
    momentum_dtype: str = "float32"

    def __post_init__(self):
        check_optimizer(self)
        _check_momentum_dtype(self)
        check_range(self, "b1", 0.0, 1.0)
        check_range(self, "b2", 0.0, 1.0)
        check_positive(self, "epsilon", "clip_global_norm", "clip_value")

    def make(self, axes: dict) -> optax.GradientTransformation:
        decay = dict(weight_decay=self.weight_decay, mask=_matrices(axes))
        adamw = optax.adamw(self.learning_rate, self.b1, self.b2, self.epsilon, mu_dtype=self.momentum_dtype, **decay)
        return _with_clipping(self, adamw)


@dataclasses.dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023). Its learning rates are 3 to 10 times smaller than AdamW's, which is the paper's advice.

    Attributes:
      learning_rate: schedule.
      b1: decay rate of the interpolation whose sign is the update.
      b2: decay rate of the momentum.
      weight_decay: weight decay of matrices, multiplied by the learning rate.
      clip_global_norm: maximum global norm of the gradient. None = no clipping.
      clip_value: maximum absolute value of each element of the gradient, before its norm. None = no clipping.
      momentum_dtype: dtype in which the momentum is stored, "float32" or "bfloat16".
    """

    learning_rate: Schedule
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 1e-3
    clip_global_norm: float | None = 1.0
    clip_value: float | None = None
    momentum_dtype: str = "float32"

    def __post_init__(self):
        check_optimizer(self)
        _check_momentum_dtype(self)
        check_range(self, "b1", 0.0, 1.0)
        check_range(self, "b2", 0.0, 1.0)
        check_positive(self, "clip_global_norm", "clip_value")

    def make(self, axes: dict) -> optax.GradientTransformation:
        decay = dict(weight_decay=self.weight_decay, mask=_matrices(axes))
        lion = optax.lion(self.learning_rate, self.b1, self.b2, self.momentum_dtype, **decay)
        return _with_clipping(self, lion)


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with optional momentum.

    Attributes:
      learning_rate: schedule.
      momentum: decay rate of the momentum. None = no momentum.
      nesterov: use Nesterov momentum.
      clip_global_norm: maximum global norm of the gradient. None = no clipping.
      clip_value: maximum absolute value of each element of the gradient, before its norm. None = no clipping.
    """

    learning_rate: Schedule
    momentum: float | None = None
    nesterov: bool = False
    clip_global_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self):
        check_optimizer(self)
        check_range(self, "momentum", 0.0, 1.0)
        check_positive(self, "clip_global_norm", "clip_value")

    def make(self, axes: dict) -> optax.GradientTransformation:
        del axes
        return _with_clipping(self, optax.sgd(self.learning_rate, self.momentum, self.nesterov))


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024): orthogonalized momentum for matrices, Adam for all other parameters.

    The matrix of every layer is orthogonalized separately, with heads joined as inputs or outputs. Embedding tables, the output
    matrix and position biases use Adam.

    Attributes:
      learning_rate: schedule of both.
      beta: decay rate of the momentum.
      ns_steps: number of Newton-Schulz iterations.
      weight_decay: weight decay of matrices, multiplied by the learning rate.
      consistent_rms: root mean square that updates of matrices are scaled to. 0.2 matches AdamW (Liu et al. 2025). None scales
        by max(1, outputs / inputs) ** 0.5.
      adam_b1, adam_b2: decay rates of Adam.
      clip_global_norm: maximum global norm of the gradient. None = no clipping.
    """

    learning_rate: Schedule
    beta: float = 0.95
    ns_steps: int = 5
    weight_decay: float = 0.0
    consistent_rms: float | None = 0.2
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    clip_global_norm: float | None = 1.0

    def __post_init__(self):
        check_optimizer(self)
        for field in ("beta", "adam_b1", "adam_b2"):
            check_range(self, field, 0.0, 1.0)
        check_positive(self, "ns_steps", "consistent_rms", "clip_global_norm")

    def make(self, axes: dict) -> optax.GradientTransformation:
        muon = contrib.muon(
            self.learning_rate,
            ns_steps=self.ns_steps,
            beta=self.beta,
            weight_decay=self.weight_decay,
            adam_b1=self.adam_b1,
            adam_b2=self.adam_b2,
            muon_weight_dimension_numbers=lambda params: _map_parameters(matrix_dimensions, axes, params),
            consistent_rms=self.consistent_rms,
        )
        return _with_clipping(self, muon)


@dataclasses.dataclass(frozen=True)
class ScheduleFreeAdamW:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): an average of the steps takes the place of a decay.

    The model's parameters are the average x, which is evaluated and saved. The gradient is computed at
    y = b1 * x + (1 - b1) * z, where AdamW without momentum moves z.

    Attributes:
      learning_rate: schedule, with a warm-up and without a decay.
      b1: share of the average in the point of the gradient, above 0.
      b2: decay rate of the second moment.
      epsilon: added to the square root of the second moment.
      weight_decay: weight decay of matrices, multiplied by the learning rate.
      weight_power: p, if steps have weights of (largest learning rate so far) ** p in the average.
      clip_global_norm: maximum global norm of the gradient. None = no clipping.
    """

    learning_rate: Schedule
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    weight_power: float = 2.0
    clip_global_norm: float | None = 1.0

    def __post_init__(self):
        check_optimizer(self)
        check_range(self, "b1", 0.0, 1.0)
        check_range(self, "b2", 0.0, 1.0)
        check_positive(self, "b1", "epsilon", "clip_global_norm")

    def make(self, axes: dict) -> optax.GradientTransformation:
        decay = dict(weight_decay=self.weight_decay, mask=_matrices(axes))
        adamw = optax.adamw(self.learning_rate, 0.0, self.b2, self.epsilon, **decay)
        of_point = contrib.schedule_free(_with_clipping(self, adamw), self.learning_rate, self.b1, self.weight_power)

        def update(grads: Any, state: contrib.ScheduleFreeState, params: Any = None) -> tuple[Any, contrib.ScheduleFreeState]:
            point = self.gradient_point(state, params)
            updates, state = of_point.update(grads, state, point)
            # Not optax's function: it has the b1 of the checkpoint, which a resumed run may have changed.
            average = lambda y, update, z: (y + update - (1.0 - self.b1) * z) / self.b1
            averages = jax.tree.map(average, point, updates, state.z)
            return jax.tree.map(jnp.subtract, averages, params), state

        return optax.GradientTransformation(of_point.init, update)

    def gradient_point(self, state: contrib.ScheduleFreeState, params: Any) -> Any:
        """Returns the parameters at which the gradient is computed."""
        return jax.tree.map(lambda x, z: self.b1 * x + (1.0 - self.b1) * z, params, state.z)


def gradient_point(optimizer: Optimizer, state: Any, params: Any) -> Any:
    """Returns the parameters at which the gradient for the next update is computed."""
    return optimizer.gradient_point(state, params) if hasattr(optimizer, "gradient_point") else params


TABLES = frozenset({"vocab", "positions"}) | UNFACTORED


def matrix_dimensions(parameter: str, names: tuple[str | None, ...]) -> contrib.MuonDimensionNumbers | None:
    """Returns the input and output dimensions of a matrix; None for other parameters, including biases.

    `layers` is a batch dimension. `embed` is one side of the matrix and all other dimensions are the other side. Without
    `embed`, the first dimension is the inputs.
    """
    dims = [i for i, name in enumerate(names) if name not in BATCH]
    if not _is_matrix(parameter, names) or TABLES & set(names):
        return None
    embed = [i for i in dims if names[i] == "embed"] or dims[:1]
    rest = [i for i in dims if i not in embed]
    inputs, outputs = (embed, rest) if embed[0] < rest[0] else (rest, embed)
    return contrib.MuonDimensionNumbers(tuple(inputs), tuple(outputs))


def _matrices(axes: dict):
    """Returns a function of params that returns a tree of bools: whether a parameter is a matrix or a stack of matrices."""
    return lambda params: _map_parameters(_is_matrix, axes, params)


def _is_matrix(parameter: str, names: tuple[str | None, ...]) -> bool:
    return len([name for name in names if name not in BATCH]) > 1 and parameter.rpartition("/")[2] != "bias"


def _map_parameters(function: Callable, axes: dict, params: Any) -> Any:
    """Returns the tree of function(name, axes) for each parameter."""
    call = lambda path, names, _: function(jax.tree_util.keystr(path, simple=True, separator="/"), names)
    return jax.tree_util.tree_map_with_path(call, axes, params, is_leaf=is_axes)


def _with_clipping(config: Any, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation of gradients that are clipped as an optimizer's settings say."""
    value = getattr(config, "clip_value", None)
    by_value = [] if value is None else [optax.clip(value)]
    by_norm = [] if config.clip_global_norm is None else [optax.clip_by_global_norm(config.clip_global_norm)]
    return optax.chain(*by_value, *by_norm, transformation)
