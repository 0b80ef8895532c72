"""Layers with named parameter axes: projections, embedding, RMS norm, MLP. All of T5's, none with a bias.

Every parameter carries `axes`, the logical names of its dimensions; tables elsewhere map names to mesh axes and to
Adafactor's rows and columns. Axis letters: B batch, T length, D embed, F mlp, V vocab.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.networks.config import ACTIVATIONS
from t5x_lab.ops.dropout import dropout


def fan_in_normal(key: jax.Array, shape: Sequence[int], fan_in: int, scale: float = 1.0) -> jax.Array:
    return jax.random.normal(key, shape) * (scale / math.sqrt(fan_in))


def fan_in_truncated_normal(key: jax.Array, shape: Sequence[int], fan_in: int) -> jax.Array:
    # 0.8796… is the standard deviation of a normal distribution cut at two standard deviations.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape) / (0.87962566103423978 * math.sqrt(fan_in))


class Projection(nnx.Module):
    """A matrix without bias between named axes, contracted as an einsum; computed in the input's dtype."""

    def __init__(self, kernel: jax.Array, axes: tuple[str, ...], equation: str):
        self.kernel = nnx.Param(kernel, axes=axes)
        self.equation = equation

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.kernel[...].astype(x.dtype))


class Embedding(nnx.Module):
    """A table [V, D], initialised N(0, 1); `attend` gives tied logits in float32."""

    def __init__(self, vocab_size: int, emb_dim: int, constrain: Callable, *, rngs: nnx.Rngs):
        self.constrain = constrain
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, emb_dim)), axes=("vocab", "embed"))

    def __call__(self, tokens: jax.Array, dtype) -> jax.Array:
        # Rows are looked up whole: a table split along D would make the compiler replicate the activations.
        table_VD = self.constrain(self.embedding[...].astype(dtype), ("vocab", "gathered"))
        return self.constrain(table_VD[tokens], ("batch", "length", "embed"))

    def attend(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("BTD,VD->BTV", x.astype(jnp.float32), self.embedding[...])


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, the mean square in float32 (Zhang & Sennrich 2019; T5's "layer norm")."""

    def __init__(self, emb_dim: int, epsilon: float = 1e-6):
        self.scale = nnx.Param(jnp.ones((emb_dim,)), axes=("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype) * self.scale[...].astype(x.dtype)


class Mlp(nnx.Module):
    """Position-wise MLP; with two activations the products are multiplied (Shazeer 2020, "GLU variants")."""

    def __init__(self, emb_dim: int, mlp_dim: int, activations: tuple[str, ...], dropout_rate: float, *, rngs: nnx.Rngs):
        names = ["wi"] if len(activations) == 1 else [f"wi_{i}" for i in range(len(activations))]
        for name in names:
            kernel = fan_in_truncated_normal(rngs.params(), (emb_dim, mlp_dim), emb_dim)
            setattr(self, name, Projection(kernel, ("embed", "mlp"), "BTD,DF->BTF"))
        kernel = fan_in_truncated_normal(rngs.params(), (mlp_dim, emb_dim), mlp_dim)
        self.wo = Projection(kernel, ("mlp", "embed"), "BTF,FD->BTD")
        self.inputs = tuple(zip(names, activations, strict=True))
        self.dropout_rate = dropout_rate

    def __call__(self, x_BTD: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        hidden_BTF = math.prod(ACTIVATIONS[activation](getattr(self, name)(x_BTD)) for name, activation in self.inputs)
        return self.wo(dropout(hidden_BTF, self.dropout_rate, dropout_key))
