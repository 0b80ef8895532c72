"""Operations of a parameter and activations with mixed precision: projection, embedding lookup, broadcast.

The parameter is cast to the activations' dtype, and its gradient is summed over tokens, devices and microbatches in the
parameter's dtype: in bfloat16 the sum of 400 ones is 256.

Axis letters: B batch, T length, V rows of a table, D columns.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, kernel: jax.Array, equation: str) -> jax.Array:
    """Returns `jnp.einsum(equation, x, kernel)`, such as "BTD,DNH->BTNH".

    The result has x's dtype. No letter may occur in one operand only.

    The gradient of the kernel is computed in the kernel's layout. JAX's own computes its transpose and transposes it back,
    which a TPU compiler fuses but a CPU compiler does not.
    """
    return jnp.einsum(equation, x, kernel.astype(x.dtype))


def _project_forward(x, kernel, equation):
    # Nothing is saved or computed for an operand without gradient, such as a frozen kernel.
    saved = (x.value if kernel.perturbed else None, kernel.value if x.perturbed else None, kernel.value[..., :0])
    return project(x.value, kernel.value, equation), saved


def _project_backward(equation, saved, d_y):
    if isinstance(d_y, SymbolicZero):
        return None, None
    x, kernel, like = saved
    ins, y_axes = equation.split("->")
    x_axes, kernel_axes = ins.split(",")
    d_x = d_kernel = None
    if kernel is not None:
        d_x = jnp.einsum(f"{y_axes},{kernel_axes}->{x_axes}", d_y, kernel.astype(d_y.dtype))
    if x is not None:
        d_kernel = jnp.einsum(f"{x_axes},{y_axes}->{kernel_axes}", x, d_y, preferred_element_type=like.dtype)
    return d_x, d_kernel


project.defvjp(_project_forward, _project_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(table_VD: jax.Array, ids_BT: jax.Array, dtype, constrain: Callable) -> jax.Array:
    """Returns rows [B, T, D] of a table in `dtype`. See `Transformer` for `constrain`."""
    # The rows are not sharded: with a table sharded along D the compiler would replicate the activations.
    return constrain(constrain(table_VD.astype(dtype), ("vocab", None))[ids_BT], ("batch", "length", None))


def _lookup_forward(table_VD, ids_BT, dtype, constrain):
    return lookup(table_VD, ids_BT, dtype, constrain), (table_VD, ids_BT)


def _lookup_backward(dtype, constrain, saved, d_rows_BTD):
    table_VD, ids_BT = saved
    d_rows_BTD = constrain(d_rows_BTD, ("batch", "length", None))
    d_table_VD = jnp.zeros_like(table_VD).at[ids_BT].add(d_rows_BTD.astype(table_VD.dtype))
    return constrain(d_table_VD, ("vocab", "embed")), None


lookup.defvjp(_lookup_forward, _lookup_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def broadcast(vector: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Broadcasts a parameter of the last axes, such as a bias, to a shape and casts it to a dtype."""
    return jnp.broadcast_to(vector.astype(dtype), shape)


def _broadcast_forward(vector, shape, dtype):
    return broadcast(vector, shape, dtype), vector


def _broadcast_backward(shape, dtype, vector, d_y):
    return (jnp.sum(d_y, axis=range(d_y.ndim - vector.ndim), dtype=vector.dtype),)


broadcast.defvjp(_broadcast_forward, _broadcast_backward)
