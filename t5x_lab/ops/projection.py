"""A matrix product whose gradients are written out.

JAX's own gradient of `x @ w` computes the transpose of w's and transposes it back. A TPU's compiler makes both one product; a
CPU's does not, and copies.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, kernel: jax.Array, equation: str) -> jax.Array:
    """`jnp.einsum(equation, x, kernel)`, such as "BTD,DNH->BTNH"; no letter may be in one operand alone."""
    return jnp.einsum(equation, x, kernel)


def _forward(x, kernel, equation):
    # Of an operand that is not differentiated, a frozen kernel or the first input, nothing is kept or computed.
    kept = (x.value if kernel.perturbed else None, kernel.value if x.perturbed else None)
    return project(x.value, kernel.value, equation), kept


def _backward(equation, kept, d_y):
    if isinstance(d_y, SymbolicZero):
        return None, None
    x, kernel = kept
    ins, y_axes = equation.split("->")
    x_axes, kernel_axes = ins.split(",")
    d_x = None if kernel is None else jnp.einsum(f"{y_axes},{kernel_axes}->{x_axes}", d_y, kernel)
    d_kernel = None if x is None else jnp.einsum(f"{x_axes},{y_axes}->{kernel_axes}", x, d_y)
    return d_x, d_kernel


project.defvjp(_forward, _backward, symbolic_zeros=True)
