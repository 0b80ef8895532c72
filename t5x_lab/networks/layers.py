"""Layers with named parameter axes: projections, embeddings, norms, MLP.

Every parameter has `axes`, the logical names of its dimensions, which are mapped to mesh axes and to Adafactor's rows and
columns. Axis letters: B batch, T length, D embed, F mlp, V vocab.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.config import ACTIVATION_FUNCTIONS, INITIALIZERS, TransformerShape
from t5x_lab.ops.dropout import dropout
from t5x_lab.ops.parameters import broadcast, lookup, project

STANDARD_DEVIATION = 0.02  # of all matrices with "standard" scaling (Radford et al. 2018, section 4.1)


def normal(key: jax.Array, shape: Sequence[int], scaling: str, fan_in: int) -> jax.Array:
    """Returns a matrix sampled from N(0, 1 / fan_in) with T5's scaling, from N(0, 0.02**2) with the standard one."""
    return jax.random.normal(key, shape) * (1 / math.sqrt(fan_in) if scaling == "t5" else STANDARD_DEVIATION)


def truncated_normal(key: jax.Array, shape: Sequence[int], scaling: str, fan_in: int) -> jax.Array:
    """Returns a matrix as `normal` does, truncated at two standard deviations with T5's scaling."""
    if scaling != "t5":
        return normal(key, shape, scaling, fan_in)
    # 0.8796... is the standard deviation of a standard normal truncated at 2.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape) / (0.87962566103423978 * math.sqrt(fan_in))


def kernel(
    c: TransformerShape, rngs: nnx.Rngs, shape: Sequence[int], inputs: int, draw: Callable = truncated_normal, fan_in: int = 0
) -> jax.Array:
    """Returns an initial kernel [*inputs, *outputs], from the configured initializer or by scaling.

    Args:
      c: configuration.
      rngs: random number generators with a `params` stream.
      shape: shape of the kernel.
      inputs: product of the input dimensions, which come first.
      draw: function that samples the kernel if there is no initializer.
      fan_in: fan-in for `draw`. 0 = `inputs`.
    """
    if c.initializer is None:
        return draw(rngs.params(), shape, c.scaling, fan_in or inputs)
    initializer = INITIALIZERS[c.initializer] if isinstance(c.initializer, str) else c.initializer
    return initializer(rngs.params(), (inputs, math.prod(shape) // inputs), jnp.float32).reshape(shape)


class Projection(nnx.Module):
    """Linear projection as an einsum, with an optional bias, computed in the input's dtype.

    Args:
      kernel: initial kernel.
      axes: its logical axes.
      equation: einsum equation, such as "BTD,DNH->BTNH".
      bias_axes: axes of the bias, a subset of `axes`. () = no bias.
    """

    def __init__(self, kernel: jax.Array, axes: tuple[str, ...], equation: str, bias_axes: tuple[str, ...] = ()):
        self.kernel = nnx.Param(kernel, axes=axes)
        self.equation, self.has_bias = equation, bool(bias_axes)
        if bias_axes:
            sizes = dict(zip(axes, kernel.shape, strict=True))
            self.bias = nnx.Param(jnp.zeros([sizes[name] for name in bias_axes]), axes=bias_axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = project(x, self.kernel[...], self.equation)
        return y + broadcast(self.bias[...], y.shape, y.dtype) if self.has_bias else y


class Embedding(nnx.Module):
    """Embedding table [V, D], initialized from N(0, 1) with T5's scaling."""

    def __init__(self, vocab_size: int, emb_dim: int, constrain: Callable, scaling: str = "t5", *, rngs: nnx.Rngs):
        self.constrain = constrain
        table = normal(rngs.params(), (vocab_size, emb_dim), scaling, fan_in=1)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))

    def __call__(self, tokens: jax.Array, dtype) -> jax.Array:
        return lookup(self.embedding[...], tokens, dtype, self.constrain)


class RMSNorm(nnx.Module):
    """RMS norm: x / rms(x) * scale, with the mean square in float32 (Zhang & Sennrich 2019; T5's "layer norm").

    It is over the last axes, whose sizes and logical axes are given.
    """

    def __init__(self, shape: tuple[int, ...], epsilon: float, axes: tuple[str, ...] = ("embed",)):
        self.scale = nnx.Param(jnp.ones(shape), axes=axes)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        axes = tuple(range(-len(self.scale.shape), 0))
        mean_square = jnp.mean(jnp.square(x32), axis=axes, keepdims=True)
        y = (x32 * jax.lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype)
        return y * broadcast(self.scale[...], x.shape, x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm: (x - mean(x)) / std(x) * scale + bias, with statistics in float32 (Ba et al. 2016)."""

    def __init__(self, shape: tuple[int], epsilon: float):
        self.scale = nnx.Param(jnp.ones(shape), axes=("embed",))
        self.bias = nnx.Param(jnp.zeros(shape), axes=("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        y = (centered * jax.lax.rsqrt(variance + self.epsilon)).astype(x.dtype)
        return y * broadcast(self.scale[...], x.shape, x.dtype) + broadcast(self.bias[...], x.shape, x.dtype)


def gather(x_BTD: jax.Array, constrain: Callable) -> jax.Array:
    """Returns the input of projections: x, whose length `tensor` shards, with a length that it does not shard.

    Its gradient is sharded as x is: a sum over devices of which each keeps its part. See `Transformer` for `constrain`.
    """
    return _reshard(x_BTD, constrain, "part", "length")


def scatter(y_BTD: jax.Array, constrain: Callable) -> jax.Array:
    """Returns the output of projections with a length that `tensor` shards, the reverse of `gather`."""
    return _reshard(y_BTD, constrain, "length", "part")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _reshard(x_BTD: jax.Array, constrain: Callable, length: str, of_gradient: str) -> jax.Array:
    return constrain(x_BTD, ("batch", length, None))


_reshard.defvjp(
    lambda x, *static: (_reshard(x, *static), None),
    lambda constrain, length, of_gradient, _, d_x: (constrain(d_x, ("batch", of_gradient, None)),),
)


def make_norm(config: TransformerShape) -> RMSNorm | LayerNorm:
    return (RMSNorm if config.norm == "rms" else LayerNorm)((config.emb_dim,), config.norm_epsilon)


class Mlp(nnx.Module):
    """Position-wise MLP; gated with two activations (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: TransformerShape, *, constrain: Callable, rngs: nnx.Rngs):
        c = config
        bias = ("mlp",) if c.has_bias("mlp") else ()

        def project_in() -> Projection:
            return Projection(kernel(c, rngs, (c.emb_dim, c.mlp_dim), c.emb_dim), ("embed", "mlp"), "BTD,DF->BTF", bias)

        # T5's names: `wi`; for a gated MLP `wi_0`, the input of the first activation, and `wi_1`.
        if len(c.mlp_activations) == 1:
            self.wi = project_in()
        else:
            self.wi_0, self.wi_1 = project_in(), project_in()
        wo = kernel(c, rngs, (c.mlp_dim, c.emb_dim), c.mlp_dim)
        self.wo = Projection(wo, ("mlp", "embed"), "BTF,FD->BTD", ("embed",) if c.has_bias("mlp") else ())
        self.activations = tuple(ACTIVATION_FUNCTIONS[x] if isinstance(x, str) else x for x in c.mlp_activations)
        self.dropout_rate, self.constrain = c.dropout_rate, constrain

    def __call__(self, x_BTD: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        if len(self.activations) == 1:
            hidden_BTF = self.activations[0](self._shard_and_name(self.wi(x_BTD)))
        else:
            gate, linear = self.activations
            hidden_BTF = gate(self._shard_and_name(self.wi_0(x_BTD))) * linear(self._shard_and_name(self.wi_1(x_BTD)))
        return self.wo(dropout(hidden_BTF, self.dropout_rate, dropout_key))

    def _shard_and_name(self, x_BTF: jax.Array) -> jax.Array:
        """Shards an activation and names it for remat policies."""
        return checkpoint_name(self.constrain(x_BTF, ("batch", "part", "mlp")), "mlp")


def output_matrix(network: Any) -> tuple[jax.Array, float]:
    """Returns the output matrix [D, V] and the scale of the logits.

    With tied logits it is the transposed embedding table, and T5's scaling divides logits by sqrt(D).
    """
    if network.config.logits_via_embedding:
        scaling = getattr(network.config, "scaling", "t5")
        table_VD = network.token_embedder.embedding[...]
        return table_VD.T, 1 / math.sqrt(table_VD.shape[1]) if scaling == "t5" else 1.0
    dense = network.logits_dense
    if getattr(dense, "peft_parts", ()):  # applied to the identity, kernel and PEFT modules give their matrix
        return dense(jnp.eye(dense.kernel.shape[0])[None])[0], 1.0
    return dense.kernel[...], 1.0
