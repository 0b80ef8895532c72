"""A matrix product whose gradients are written out.

JAX's own gradient of `x @ w` computes the transpose of w's and transposes it back. A TPU's compiler makes both one product; a
CPU's does not, and copies.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, kernel: jax.Array, equation: str) -> jax.Array:
    """`jnp.einsum(equation, x, kernel)`, such as "BTD,DNH->BTNH"; no letter may be in one operand alone."""
    return jnp.einsum(equation, x, kernel)


def _forward(x, kernel, equation):
    return project(x, kernel, equation), (x, kernel)


def _backward(equation, operands, d_y):
    x, kernel = operands
    ins, y_axes = equation.split("->")
    x_axes, kernel_axes = ins.split(",")
    d_x = jnp.einsum(f"{y_axes},{kernel_axes}->{x_axes}", d_y, kernel)
    d_kernel = jnp.einsum(f"{x_axes},{y_axes}->{kernel_axes}", x, d_y)
    return d_x, d_kernel


project.defvjp(_forward, _backward)
