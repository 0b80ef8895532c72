"""Where parameters meet activations: a matrix product, a lookup, a broadcast.

Each rounds the parameter to the activations' dtype, and sums its gradient, over tokens, devices and microbatches, in the
parameter's own: 256 ones added in bfloat16 are as many as 400.

Axis letters: B batch, T length, V rows of a table, D columns.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, kernel: jax.Array, equation: str) -> jax.Array:
    """`jnp.einsum(equation, x, kernel)`, such as "BTD,DNH->BTNH", in x's dtype; no letter may be in one operand alone.

    The gradients are written out. JAX's own computes the transpose of the kernel's and transposes it back; a TPU's compiler
    makes both one product, a CPU's copies.
    """
    return jnp.einsum(equation, x, kernel.astype(x.dtype))


def _project_forward(x, kernel, equation):
    # Of an operand that is not differentiated, a frozen kernel or the first input, nothing is kept or computed.
    kept = (x.value if kernel.perturbed else None, kernel.value if x.perturbed else None, kernel.value[..., :0])
    return project(x.value, kernel.value, equation), kept


def _project_backward(equation, kept, d_y):
    if isinstance(d_y, SymbolicZero):
        return None, None
    x, kernel, like = kept
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
    """Rows [B, T, D] of a table, in `dtype`; `constrain` is that of `Transformer`."""
    # Rows are looked up whole: a table split along D would make the compiler replicate the activations.
    return constrain(constrain(table_VD.astype(dtype), ("vocab", None))[ids_BT], ("batch", "length", None))


def _lookup_forward(table_VD, ids_BT, dtype, constrain):
    return lookup(table_VD, ids_BT, dtype, constrain), (table_VD, ids_BT)


def _lookup_backward(dtype, constrain, kept, d_rows_BTD):
    table_VD, ids_BT = kept
    d_rows_BTD = constrain(d_rows_BTD, ("batch", "length", None))
    d_table_VD = jnp.zeros_like(table_VD).at[ids_BT].add(d_rows_BTD.astype(table_VD.dtype))
    return constrain(d_table_VD, ("vocab", "embed")), None


lookup.defvjp(_lookup_forward, _lookup_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def broadcast(vector: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """A parameter of an array's last axes, such as a bias or the scale of a norm, in the array's shape and dtype."""
    return jnp.broadcast_to(vector.astype(dtype), shape)


def _broadcast_forward(vector, shape, dtype):
    return broadcast(vector, shape, dtype), vector


def _broadcast_backward(shape, dtype, vector, d_y):
    return (jnp.sum(d_y, axis=range(d_y.ndim - vector.ndim), dtype=vector.dtype),)


broadcast.defvjp(_broadcast_forward, _broadcast_backward)
