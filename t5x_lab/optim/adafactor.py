"""Adafactor with factoring by logical axes (Shazeer & Stern 2018), as in T5X, for stacked layers.

`optax.adafactor` factors the two largest dimensions and computes root mean squares over a whole stack, so a scanned model would
train differently from an unrolled one. Here `layers` is a batch axis, rows are `embed`, columns are the axes that `embed` is
projected to, and every layer of a stack is updated independently.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from t5x_lab.partitioning.rules import is_axes

ROWS = frozenset({"embed", "recurrent"})
COLUMNS = frozenset({"vocab", "positions", "mlp", "heads", "kv_heads", "kv", "joined_kv", "gates", "units"})
BATCH = frozenset({"layers"})
UNFACTORED = frozenset({"relpos_buckets"})


class AdafactorState(NamedTuple):
    """Step count, and for each parameter row and column means or the full second moment. Unused leaves have shape (1,).

    Means keep reduced dimensions with size 1, so that a leaf has the axes of its parameter.
    """

    step: jax.Array
    v_row: optax.Updates
    v_col: optax.Updates
    v: optax.Updates
    m: optax.Updates | None


@dataclasses.dataclass(frozen=True)
class Factoring:
    """Row and column dimensions of a parameter, () if not factored, and the dimensions of its root mean square."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    averaged: tuple[int, ...]


def factoring(axes: tuple[str | None, ...], shape: tuple[int, ...], min_dim_size_to_factor: int) -> Factoring:
    """Returns the factoring of a parameter.

    A parameter is factored if it has rows and columns, no axis in `UNFACTORED`, and both sizes, with columns such as `heads,
    kv` joined, are at least `min_dim_size_to_factor`. If an axis is unknown or unnamed, the first dimension is the rows and the
    others are the columns.
    """
    averaged = tuple(i for i, name in enumerate(axes) if name not in BATCH)
    rows = tuple(i for i in averaged if axes[i] in ROWS)
    columns = tuple(i for i in averaged if axes[i] in COLUMNS)
    if set(axes) - ROWS - COLUMNS - BATCH - UNFACTORED:
        rows, columns = averaged[:1], averaged[1:]
    sizes = [math.prod(shape[i] for i in dims) if dims else 0 for dims in (rows, columns)]
    if min(sizes) < max(min_dim_size_to_factor, 1) or UNFACTORED & set(axes):
        rows = columns = ()
    return Factoring(rows, columns, averaged)


def adafactor(
    learning_rate: Callable[[jax.Array], jax.Array],
    axes: dict,
    *,
    decay_rate: float = 0.8,
    clipping_threshold: float | None = 1.0,
    multiply_by_parameter_scale: bool = True,
    min_dim_size_to_factor: int = 128,
    momentum: float | None = None,
    momentum_dtype: str = "float32",
    weight_decay: float | None = None,
    weight_decay_lr_exponent: float | None = None,
    clip_global_norm: float | None = None,
    step_offset: int = 0,
    epsilon1: float = 1e-30,
    epsilon2: float = 1e-3,
) -> optax.GradientTransformation:
    """Returns Adafactor with T5X's defaults: no momentum, relative step sizes, update clipping.

    With g the gradient, t the step from 1 and beta2_t = 1 - t**-decay_rate (the paper's section 7.2):

        V_t = beta2_t V_{t-1} + (1 - beta2_t) (g**2 + epsilon1), stored as row and column means if factored
        U   = g / sqrt(V_t);  U /= max(1, rms(U) / clipping_threshold)
        x  -= learning_rate(t - 1) * max(epsilon2, rms(x)) * U

    Args:
      learning_rate: function of the step, from 0.
      axes: logical axes of the parameters, in their tree.
      decay_rate: exponent of the decay of the second moment.
      clipping_threshold: threshold of update clipping. None = no clipping.
      multiply_by_parameter_scale: multiply updates by max(epsilon2, rms(x)).
      min_dim_size_to_factor: smaller matrices have a full second moment.
      momentum: decay rate of the momentum. None = none, which saves memory.
      momentum_dtype: dtype in which it is stored.
      weight_decay: fraction of the parameter that is subtracted in each step, or None.
      weight_decay_lr_exponent: e multiplies the weight decay, 1 if it is None, by learning_rate**e. None = no factor.
      clip_global_norm: maximum global norm of the gradient before all else. None = no clipping.
      step_offset: t counts from this step, at which moments start anew. The learning rate does not depend on it.
      epsilon1, epsilon2: see above.

    Returns:
      An optax transformation whose updates are added to the parameters.
    """

    def factorings(params):
        return jax.tree.map(lambda a, p: factoring(a, p.shape, min_dim_size_to_factor), axes, params, is_leaf=is_axes)

    def init(params):
        plan = factorings(params)

        def zeros(kind):
            def make(f: Factoring, p):
                shapes = {
                    "v_row": _reduced(p.shape, f.columns) if f.rows else (1,),
                    "v_col": _reduced(p.shape, f.rows) if f.rows else (1,),
                    "v": (1,) if f.rows else p.shape,
                    "m": p.shape,
                }
                return jnp.zeros(shapes[kind], momentum_dtype if kind == "m" else jnp.float32)

            return jax.tree.map(make, plan, params)

        m = None if momentum is None else zeros("m")
        return AdafactorState(jnp.zeros((), jnp.int32), zeros("v_row"), zeros("v_col"), zeros("v"), m)

    def update(grads, state, params):
        rate = learning_rate(state.step)
        decay = weight_decay
        if weight_decay_lr_exponent is not None:
            decay = (1.0 if weight_decay is None else weight_decay) * rate**weight_decay_lr_exponent
        if clip_global_norm is not None:
            grads, _ = optax.clip_by_global_norm(clip_global_norm).update(grads, optax.EmptyState())
        t = jnp.maximum(state.step - step_offset, 0).astype(jnp.float32) + 1.0
        beta2 = 1.0 - t**-decay_rate

        def update_parameter(f: Factoring, p, g, v_row, v_col, v):
            g = g.astype(jnp.float32)
            square = g * g + epsilon1
            if f.rows:
                v_row = beta2 * v_row + (1 - beta2) * jnp.mean(square, axis=f.columns, keepdims=True)
                v_col = beta2 * v_col + (1 - beta2) * jnp.mean(square, axis=f.rows, keepdims=True)
                u = g * jax.lax.rsqrt(v_row / jnp.mean(v_row, axis=f.rows, keepdims=True)) * jax.lax.rsqrt(v_col)
            else:
                v = beta2 * v + (1 - beta2) * square
                u = g * jax.lax.rsqrt(v)
            if clipping_threshold is not None:
                u /= jnp.maximum(1.0, _rms(u, f.averaged) / clipping_threshold)
            scale = jnp.maximum(_rms(p, f.averaged), epsilon2) if multiply_by_parameter_scale else 1.0
            return -rate * scale * u, v_row, v_col, v

        plan = factorings(params)
        out = jax.tree.map(update_parameter, plan, params, grads, state.v_row, state.v_col, state.v)
        updates, v_row, v_col, v = jax.tree.transpose(jax.tree.structure(plan), None, out)
        m = state.m
        if momentum is not None:
            updates = jax.tree.map(lambda old, new: momentum * old.astype(new.dtype) + (1 - momentum) * new, m, updates)
            m = jax.tree.map(lambda update: update.astype(momentum_dtype), updates)
        if decay is not None:
            updates = jax.tree.map(lambda u, p: u - decay * p, updates, params)
        return updates, AdafactorState(state.step + 1, v_row, v_col, v, m)

    return optax.GradientTransformation(init, update)


def _reduced(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in dims else size for i, size in enumerate(shape))


def _rms(x: jax.Array, averaged: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=averaged, keepdims=True))
