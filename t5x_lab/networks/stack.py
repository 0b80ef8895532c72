"""A stack of equal layers: parameters stored on a leading `layers` axis, run as one scan or unrolled, with remat."""

from collections.abc import Callable

import jax
from flax import nnx

from t5x_lab.networks.attention import KeyValues, MultiHeadAttention
from t5x_lab.networks.config import TransformerConfig
from t5x_lab.networks.layers import Mlp, RMSNorm
from t5x_lab.networks.positions import RelativeBias
from t5x_lab.ops.attention import DiagonalBias, Mask
from t5x_lab.ops.dropout import dropout

REMAT_POLICIES = {
    "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Layer(nnx.Module):
    """Self-attention, cross-attention where `cross`, and MLP; each x + dropout(f(norm(x)))."""

    def __init__(self, config: TransformerConfig, *, cross: bool, bidirectional: bool, rngs: nnx.Rngs):
        c = config

        def attention():
            return MultiHeadAttention(c.emb_dim, c.num_heads, c.head_dim, c.dropout_rate, rngs=rngs)

        self.pre_self_attention_layer_norm = RMSNorm(c.emb_dim)
        self.self_attention = attention()
        if c.relative_bias == "per_layer":
            self.relpos_bias = relative_bias(c, bidirectional, rngs)
        if cross:
            self.pre_cross_attention_layer_norm = RMSNorm(c.emb_dim)
            self.encoder_decoder_attention = attention()
        self.pre_mlp_layer_norm = RMSNorm(c.emb_dim)
        self.mlp = Mlp(c.emb_dim, c.mlp_dim, c.mlp_activations, c.dropout_rate, rngs=rngs)
        self.dropout_rate, self.cross, self.own_bias = c.dropout_rate, cross, c.relative_bias == "per_layer"

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask,
        bias: DiagonalBias | None,
        cross_mask: Mask | None,
        cross_keys_values: KeyValues | None,
        cache: KeyValues | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, KeyValues | None]:
        keys = [None] * 6 if dropout_key is None else list(jax.random.split(dropout_key, 6))

        y = self.pre_self_attention_layer_norm(x)
        keys_values = self.self_attention.keys_values(y)
        if cache is not None:
            cache = keys_values = cache.write(keys_values, mask.query_offset)
        if self.own_bias:
            slots = keys_values.key.shape[1]
            bias = self.relpos_bias(x.shape[1] if cache is None else slots, slots, x.dtype)
        y = self.self_attention(y, keys_values, mask=mask, bias=bias, dropout_key=keys[0])
        x = x + dropout(y, self.dropout_rate, keys[1])

        if self.cross:
            y = self.pre_cross_attention_layer_norm(x)
            y = self.encoder_decoder_attention(y, cross_keys_values, mask=cross_mask, dropout_key=keys[2])
            x = x + dropout(y, self.dropout_rate, keys[3])

        y = self.mlp(self.pre_mlp_layer_norm(x), dropout_key=keys[4])
        return x + dropout(y, self.dropout_rate, keys[5]), cache


class Stack(nnx.Module):
    """`num_layers` layers and the final norm; the relative bias too, where the stack shares one."""

    def __init__(
        self, config: TransformerConfig, num_layers: int, *, cross: bool, bidirectional: bool, constrain, rngs: nnx.Rngs
    ):
        self.layers = stacked(lambda rngs: Layer(config, cross=cross, bidirectional=bidirectional, rngs=rngs), num_layers, rngs)
        self.final_norm = RMSNorm(config.emb_dim)
        if config.relative_bias == "shared":
            self.relpos_bias = relative_bias(config, bidirectional, rngs)
        self.config, self.num_layers, self.constrain = config, num_layers, constrain

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask,
        cross_mask: Mask | None = None,
        cross_keys_values: KeyValues | None = None,
        encoded: jax.Array | None = None,
        cache: KeyValues | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Runs the layers on x [B, T, D].

        Cross-attention takes its keys and values from `cross_keys_values` (a stack's, computed once for decoding), or
        computes them layer by layer from `encoded` [B, S, D].

        Returns:
          (output [B, T, D], the written cache or None)
        """
        c = self.config
        bias = None
        if c.relative_bias == "shared":
            slots = x.shape[1] if cache is None else cache.key.shape[2]
            bias = self.relpos_bias(slots, slots, x.dtype)
        graph, params = nnx.split(self.layers, nnx.Param)
        keys = None if dropout_key is None else jax.random.split(dropout_key, self.num_layers + 2)
        if keys is not None:
            x = dropout(x, c.dropout_rate, keys[-2])

        def run_layer(x, inputs):
            layer_params, layer_cross, layer_cache, key = inputs
            layer = nnx.merge(graph, layer_params)
            if encoded is not None:
                layer_cross = layer.encoder_decoder_attention.keys_values(encoded)
            x, layer_cache = layer(
                x,
                mask=mask,
                bias=bias,
                cross_mask=cross_mask,
                cross_keys_values=layer_cross,
                cache=layer_cache,
                dropout_key=key,
            )
            return self.constrain(x, ("batch", "length", "embed")), layer_cache

        if c.remat_policy != "none":
            run_layer = jax.checkpoint(run_layer, policy=REMAT_POLICIES[c.remat_policy], prevent_cse=not c.scan_layers)
        inputs = (params, cross_keys_values, cache, None if keys is None else keys[: self.num_layers])
        run = jax.lax.scan if c.scan_layers else unrolled
        x, cache = run(run_layer, self.constrain(x, ("batch", "length", "embed")), inputs)
        x = self.final_norm(x)
        return dropout(x, c.dropout_rate, None if keys is None else keys[-1]), cache

    def cross_keys_values(self, encoded: jax.Array) -> KeyValues:
        """Keys and values of every layer's cross-attention, [layers, B, S, N, H]."""
        graph, params = nnx.split(self.layers, nnx.Param)

        def of_layer(layer_params) -> KeyValues:
            layer: Layer = nnx.merge(graph, layer_params)
            return layer.encoder_decoder_attention.keys_values(encoded)

        return jax.lax.map(of_layer, params)


def relative_bias(config: TransformerConfig, bidirectional: bool, rngs: nnx.Rngs) -> RelativeBias:
    return RelativeBias(config.num_heads, config.relpos_buckets, config.relpos_max_distance, bidirectional, rngs=rngs)


def stacked(make_layer: Callable[[nnx.Rngs], Layer], num_layers: int, rngs: nnx.Rngs) -> Layer:
    """One module whose every parameter has a leading `layers` axis, each layer initialised with its own key."""
    graph, params = nnx.split(nnx.eval_shape(lambda: make_layer(nnx.Rngs(params=0))), nnx.Param)

    def init(key):
        return nnx.to_pure_dict(nnx.state(make_layer(nnx.Rngs(params=key)), nnx.Param))

    nnx.replace_by_pure_dict(params, jax.vmap(init)(jax.random.split(rngs.params(), num_layers)))
    for _, param in nnx.to_flat_state(params):
        param.set_metadata(axes=("layers", *param.get_metadata("axes")))
    return nnx.merge(graph, params)


def unrolled(body, carry, inputs):
    """`jax.lax.scan` written out. Splitting, unlike one index per layer, has a concatenation as its transpose."""
    leaves, tree = jax.tree.flatten(inputs)
    num_layers = leaves[0].shape[0]
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    outputs = []
    for layer in range(num_layers):
        carry, output = body(carry, jax.tree.unflatten(tree, [pieces[layer][0] for pieces in split]))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *outputs)
