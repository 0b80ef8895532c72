"""What gin binds as OPTIMIZER: the protocol, T5X's Adafactor, and optax's transformations as thin dataclasses."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from optax import contrib

from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.optim.adafactor import BATCH, UNFACTORED, adafactor
from t5x_lab.optim.schedules import LearningRate, Schedule
from t5x_lab.partitioning.rules import is_axes


@runtime_checkable
class Optimizer(Protocol):
    """An optax transformation that knows the axes of the parameters.

    A leaf of its state is sharded like the parameter whose path ends its own and whose rank it has; all others are copied to
    every device.

    Attributes:
      learning_rate: of a step, for the metrics; the transformation applies it itself.

    It may have more, as `Groups` has: learning_rates, by group, whose states its own is a tuple of; is_trained(name), false
    where frozen; check_names(names), of all parameters; identity(), what a run is continued with unchanged.
    """

    learning_rate: Schedule

    def make(self, axes: dict) -> optax.GradientTransformation:
        """The transformation for parameters with these logical axes: a tree of tuples of names, None = unnamed.

        Its updates are added to the parameters.
        """


def check_optimizer(config) -> None:
    """`check_types`, with a sentence of its own for a number in the place of a schedule."""
    rate = config.learning_rate
    if isinstance(rate, int | float):
        raise UserError(
            f"{type(config).__name__}.learning_rate is {rate}; it is a function of the step. For a constant one bind "
            f'@LearningRate(), LearningRate.factors = "constant" and LearningRate.base_learning_rate = {rate}.'
        )
    check_types(config)


@dataclasses.dataclass(frozen=True)
class Optax:
    """Any optax transformation as an `Optimizer`: `Optax(optax.lion(rate), rate)`."""

    transformation: optax.GradientTransformation
    learning_rate: Schedule

    def __post_init__(self):
        if isinstance(self.learning_rate, int | float):
            raise UserError(
                f"Optax has the learning rate {self.learning_rate}; it is a function of the step, and the same one that the "
                "transformation is made with: rate = lambda step: 0.01, and Optax(optax.lion(rate), rate)."
            )

    def make(self, axes: dict) -> optax.GradientTransformation:
        del axes
        return self.transformation


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """T5X's Adafactor (Shazeer & Stern 2018); see `t5x_lab.optim.adafactor`.

    Attributes:
      learning_rate: a schedule.
      decay_rate: c of the second moment's decay, 1 - n ** -c at step n.
      clipping_threshold: of the root mean square of a parameter's update; None = not clipped.
      multiply_by_parameter_scale: whether an update is multiplied by the root mean square of what it changes.
      min_dim_size_to_factor: a second moment is factored where its two dimensions are at least so large.
      momentum: of the updates; None = none, and no memory for it.
      weight_decay: of all parameters; None = none.
    """

    learning_rate: Schedule = LearningRate()
    decay_rate: float = 0.8
    clipping_threshold: float | None = 1.0
    multiply_by_parameter_scale: bool = True
    min_dim_size_to_factor: int = 128
    momentum: float | None = None
    weight_decay: float | None = None

    def __post_init__(self):
        check_optimizer(self)
        check_range(self, "momentum", 0.0, 1.0)
        check_positive(self, "clipping_threshold", "min_dim_size_to_factor")
        if not 0 < self.decay_rate < 1:
            raise UserError(f"Adafactor.decay_rate is {self.decay_rate}; it must lie between 0 and 1. T5 uses 0.8.")

    def make(self, axes: dict) -> optax.GradientTransformation:
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "learning_rate"}
        return adafactor(self.learning_rate, axes, **options)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019) with a clipped global norm; matrices decay, biases and norms' scales do not.

    Attributes:
      learning_rate: a schedule.
      b1, b2: decay rates of the gradient's first and second moment.
      epsilon: added to the root of the second one.
      weight_decay: of the matrices, multiplied by the learning rate.
      clip_global_norm: of the gradient; None = not clipped.
    """

    learning_rate: Schedule = LearningRate("constant * linear_warmup * cosine_decay", 1e-4, 1_000)
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_global_norm: float | None = 1.0

    def __post_init__(self):
        check_optimizer(self)
        check_range(self, "b1", 0.0, 1.0)
        check_range(self, "b2", 0.0, 1.0)
        check_positive(self, "epsilon", "clip_global_norm")

    def make(self, axes: dict) -> optax.GradientTransformation:
        decay = dict(weight_decay=self.weight_decay, mask=_matrices(axes))
        adamw = optax.adamw(self.learning_rate, self.b1, self.b2, self.epsilon, **decay)
        return _clipped(self.clip_global_norm, adamw)


@dataclasses.dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023), as optax has it; matrices decay. Its rates are three to ten times smaller than AdamW's.

    Attributes:
      learning_rate: a schedule.
      b1: of the momentum whose sign is the update.
      b2: decay rate of the momentum that is kept.
      weight_decay: of the matrices, multiplied by the learning rate.
      clip_global_norm: of the gradient; None = not clipped.
    """

    learning_rate: Schedule
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 1e-3
    clip_global_norm: float | None = 1.0

    def __post_init__(self):
        check_optimizer(self)
        check_range(self, "b1", 0.0, 1.0)
        check_range(self, "b2", 0.0, 1.0)
        check_positive(self, "clip_global_norm")

    def make(self, axes: dict) -> optax.GradientTransformation:
        lion = optax.lion(self.learning_rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=_matrices(axes))
        return _clipped(self.clip_global_norm, lion)


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent, with momentum where it is given.

    Attributes:
      learning_rate: a schedule.
      momentum: its decay rate; None = none, and no memory for it.
      nesterov: whether the momentum is Nesterov's.
      clip_global_norm: of the gradient; None = not clipped.
    """

    learning_rate: Schedule
    momentum: float | None = None
    nesterov: bool = False
    clip_global_norm: float | None = None

    def __post_init__(self):
        check_optimizer(self)
        check_range(self, "momentum", 0.0, 1.0)
        check_positive(self, "clip_global_norm")

    def make(self, axes: dict) -> optax.GradientTransformation:
        del axes
        return _clipped(self.clip_global_norm, optax.sgd(self.learning_rate, self.momentum, self.nesterov))


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024), as optax has it: matrices by orthogonalised momentum, all else by Adam.

    Every layer's matrix is orthogonalised by itself, with heads joined as its inputs or outputs. Embedding tables, the output
    matrix and position biases are Adam's.

    Attributes:
      learning_rate: of both.
      beta: of the momentum.
      ns_steps: Newton-Schulz iterations.
      weight_decay: of the matrices, multiplied by the learning rate.
      consistent_rms: the root mean square that updates of matrices are scaled to, 0.2 to match AdamW's (Liu et al. 2025);
        None scales by max(1, outputs / inputs) ** 0.5.
      adam_b1, adam_b2: Adam's.
      clip_global_norm: of the gradient.
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
            muon_weight_dimension_numbers=lambda params: _of_each(matrix_dimensions, axes, params),
            consistent_rms=self.consistent_rms,
        )
        return _clipped(self.clip_global_norm, muon)


TABLES = frozenset({"vocab", "positions"}) | UNFACTORED


def matrix_dimensions(parameter: str, names: tuple[str | None, ...]) -> contrib.MuonDimensionNumbers | None:
    """Which dimensions of a parameter are a matrix's inputs and which its outputs; None where it is no matrix.

    A bias has a dimension for each of the outputs', such as heads and their size, and is no matrix. `layers` counts the
    matrices. `embed` is one side of a matrix and all other dimensions the other; without it, the first dimension is the inputs.
    """
    dims = [i for i, name in enumerate(names) if name not in BATCH]
    if not _is_matrix(parameter, names) or TABLES & set(names):
        return None
    embed = [i for i in dims if names[i] == "embed"] or dims[:1]
    rest = [i for i in dims if i not in embed]
    inputs, outputs = (embed, rest) if embed[0] < rest[0] else (rest, embed)
    return contrib.MuonDimensionNumbers(tuple(inputs), tuple(outputs))


def _matrices(axes: dict):
    """params -> a tree of whether each is a matrix, or a stack of them."""
    return lambda params: _of_each(_is_matrix, axes, params)


def _is_matrix(parameter: str, names: tuple[str | None, ...]) -> bool:
    return len([name for name in names if name not in BATCH]) > 1 and parameter.rpartition("/")[2] != "bias"


def _of_each(function: Callable, axes: dict, params: Any) -> Any:
    """A tree of what a function gives for the name of each parameter and its axes."""
    of_path = lambda path, names, _: function(jax.tree_util.keystr(path, simple=True, separator="/"), names)
    return jax.tree_util.tree_map_with_path(of_path, axes, params, is_leaf=is_axes)


def _clipped(norm: float | None, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(*([] if norm is None else [optax.clip_by_global_norm(norm)]), transformation)
