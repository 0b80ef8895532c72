"""A stack of equal layers: parameters stored on a leading `layers` axis, run as one scan or unrolled, with remat."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.attention import KeyValues, MultiHeadAttention
from t5x_lab.networks.config import REMAT_POLICIES, TransformerConfig
from t5x_lab.networks.layers import Mlp, make_norm
from t5x_lab.networks.positions import RelativeBias
from t5x_lab.ops.attention import DiagonalBias, Mask
from t5x_lab.ops.dropout import dropout


class Layer(nnx.Module):
    """Self-attention, cross-attention where there is an encoder's output to attend to, and MLP."""

    def __init__(self, config: TransformerConfig, *, cross: bool, constrain: Callable, rngs: nnx.Rngs):
        self.config, self.constrain = config, constrain
        self.own_bias = config.positions == "relative" and config.relative_bias == "per_layer"
        self.self_attention = MultiHeadAttention(config, constrain=constrain, rngs=rngs)
        self._add_norm("self_attention")
        if self.own_bias:
            self.relpos_bias = relative_bias(config, rngs)
        if cross:
            self.encoder_decoder_attention = MultiHeadAttention(config, constrain=constrain, rngs=rngs)
            self._add_norm("cross_attention")
        self.mlp = Mlp(config, constrain=constrain, rngs=rngs)
        self._add_norm("mlp")

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask,
        bias: DiagonalBias | None,
        positions: jax.Array | None,
        cross_mask: Mask | None,
        cross_keys_values: KeyValues | None,
        cache: KeyValues | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, KeyValues | None]:
        keys = [None] * 6 if dropout_key is None else list(jax.random.split(dropout_key, 6))

        y = self._enter("self_attention", x)
        keys_values = self.self_attention.keys_values(y, positions)
        if cache is not None:
            cache = keys_values = cache.write(keys_values, mask.query_offset)
        if self.own_bias:
            slots = keys_values.key.shape[1]
            span = x.shape[1] if cache is None else slots
            bias = self.relpos_bias(span, slots, x.dtype, bidirectional=has_bidirectional_bias(self.config, mask))
        y = self.self_attention(y, keys_values, mask=mask, bias=bias, positions=positions, dropout_key=keys[0])
        x = self._leave("self_attention", x, y, keys[1])

        if cross_keys_values is not None:
            assert cross_mask is not None
            y = self._enter("cross_attention", x)
            y = self.encoder_decoder_attention(y, cross_keys_values, mask=cross_mask, dropout_key=keys[2])
            x = self._leave("cross_attention", x, y, keys[3])

        y = self.mlp(self._enter("mlp", x), dropout_key=keys[4])
        return self._leave("mlp", x, y, keys[5]), cache

    # T5X's names for the norms, "pre_mlp_layer_norm" and so on, say where they stand.
    def _add_norm(self, sublayer: str) -> None:
        setattr(self, f"{self.config.norm_position}_{sublayer}_layer_norm", make_norm(self.config))

    def _enter(self, sublayer: str, x: jax.Array) -> jax.Array:
        return getattr(self, f"pre_{sublayer}_layer_norm")(x) if self.config.norm_position == "pre" else x

    def _leave(self, sublayer: str, x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
        y = checkpoint_name(self.constrain(y, ("batch", "length", "embed")), "sublayers")
        x = x + dropout(y, self.config.dropout_rate, key)
        return x if self.config.norm_position == "pre" else getattr(self, f"post_{sublayer}_layer_norm")(x)


class Stack(nnx.Module):
    """`num_layers` layers, the final norm of pre-norm layers, and the relative bias where the stack shares one."""

    def __init__(self, config: TransformerConfig, num_layers: int, *, cross: bool, constrain, rngs: nnx.Rngs):
        self.layers = stacked(lambda rngs: Layer(config, cross=cross, constrain=constrain, rngs=rngs), num_layers, rngs)
        if config.norm_position == "pre":
            self.final_norm = make_norm(config)
        self.shared_bias = config.positions == "relative" and config.relative_bias == "shared"
        if self.shared_bias:
            self.relpos_bias = relative_bias(config, rngs)
        self.config, self.num_layers, self.constrain = config, num_layers, constrain

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask,
        positions: jax.Array | None = None,
        cross_mask: Mask | None = None,
        cross_keys_values: KeyValues | None = None,
        encoded: jax.Array | None = None,
        cache: KeyValues | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Runs the layers on x [B, T, D].

        Cross-attention takes its keys and values from `cross_keys_values` (a stack's, computed once for decoding), or
        computes them layer by layer from `encoded` [B, S, D]; with neither there is none. `positions` [B or 1, T] turn
        queries and keys (rotary).

        Returns:
          (output [B, T, D], the written cache or None)
        """
        c = self.config
        bias = None
        if self.shared_bias:
            slots = x.shape[1] if cache is None else cache.key.shape[2]
            bias = self.relpos_bias(slots, slots, x.dtype, bidirectional=has_bidirectional_bias(c, mask))
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
                positions=positions,
                cross_mask=cross_mask,
                cross_keys_values=layer_cross,
                cache=layer_cache,
                dropout_key=key,
            )
            return self.constrain(x, ("batch", "length", "embed")), layer_cache

        kept = REMAT_POLICIES[c.remat_policy]
        if kept is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            run_layer = jax.checkpoint(run_layer, policy=policy, prevent_cse=not c.scan_layers)
        inputs = (params, cross_keys_values, cache, None if keys is None else keys[: self.num_layers])
        run = jax.lax.scan if c.scan_layers else unrolled
        x, cache = run(run_layer, self.constrain(x, ("batch", "length", "embed")), inputs)
        if c.norm_position == "post":
            return x, cache  # each sub-layer has dropped and normalised what it wrote
        return dropout(self.final_norm(x), c.dropout_rate, None if keys is None else keys[-1]), cache

    def cross_keys_values(self, encoded: jax.Array) -> KeyValues:
        """Keys and values of every layer's cross-attention, [layers, B, S, K, H]."""
        graph, params = nnx.split(self.layers, nnx.Param)

        def of_layer(layer_params) -> KeyValues:
            layer: Layer = nnx.merge(graph, layer_params)
            return layer.encoder_decoder_attention.keys_values(encoded)

        return jax.lax.map(of_layer, params)


def relative_bias(config: TransformerConfig, rngs: nnx.Rngs) -> RelativeBias:
    return RelativeBias(config.num_heads, config.relpos_buckets, config.relpos_max_distance, rngs=rngs)


def has_bidirectional_bias(config: TransformerConfig, mask: Mask) -> bool:
    """An encoder's buckets tell left from right; a decoder's only where the configuration asks for it."""
    return not mask.causal or config.bidirectional_bias


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
