"""A stack of equal layers: parameters stored on a leading `layers` axis, run as one scan or unrolled, with remat."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.attention import Cache, KeyValues, MultiHeadAttention
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
        cache: Cache | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, KeyValues | Cache]:
        """The layer's output, and the keys and values that it made, or the cache that they were written into."""
        keys = [None] * 6 if dropout_key is None else list(jax.random.split(dropout_key, 6))

        y = self._enter("self_attention", x)
        keys_values = self.self_attention.keys_values(y, positions)
        made: KeyValues | Cache = keys_values
        if cache is not None:
            assert mask.query_offset is not None
            made = cache = cache.write(keys_values, mask.query_offset)
            keys_values = cache.keys_values
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
        return self._leave("mlp", x, y, keys[5]), made

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
        encoded: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        keep: bool = False,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Runs the layers on x [B, T, D].

        Cross-attention computes its keys and values layer by layer from `encoded` [B, S, D]; without it there is none.
        `positions` [B or 1, T] turn queries and keys (rotary).

        Returns:
          (output [B, T, D], self-attention's keys and values [layers, B, T, K, H] if they are to be kept)
        """
        c = self.config
        bias = self._shared_bias(x.shape[1], x, mask)
        graph, params = nnx.split(self.layers, nnx.Param)
        keys = None if dropout_key is None else jax.random.split(dropout_key, self.num_layers + 2)
        if keys is not None:
            x = dropout(x, c.dropout_rate, keys[-2])

        def run_layer(x, inputs):
            layer_params, key = inputs
            layer = nnx.merge(graph, layer_params)
            x, made = layer(
                x,
                mask=mask,
                bias=bias,
                positions=positions,
                cross_mask=cross_mask,
                cross_keys_values=None if encoded is None else layer.encoder_decoder_attention.keys_values(encoded),
                cache=None,
                dropout_key=key,
            )
            return self.constrain(x, ("batch", "length", "embed")), made if keep else None

        kept = REMAT_POLICIES[c.remat_policy]
        if kept is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            run_layer = jax.checkpoint(run_layer, policy=policy, prevent_cse=not c.scan_layers)
        inputs = (params, None if keys is None else keys[: self.num_layers])
        run = jax.lax.scan if c.scan_layers else unrolled
        x, made = run(run_layer, self.constrain(x, ("batch", "length", "embed")), inputs)
        if c.norm_position == "post":
            return x, made  # each sub-layer has dropped and normalised what it wrote
        return dropout(self.final_norm(x), c.dropout_rate, None if keys is None else keys[-1]), made

    def _shared_bias(self, length: int, x: jax.Array, mask: Mask) -> DiagonalBias | None:
        if not self.shared_bias:
            return None
        return self.relpos_bias(length, length, x.dtype, bidirectional=has_bidirectional_bias(self.config, mask))

    # Decoding runs the layers one by one: in a scan, a step would copy each layer's parameters and cache to look at them.

    def apart(self) -> tuple[Layer, ...]:
        """The layers as modules of their own; to be taken once, before the loop over tokens."""
        graph, params = nnx.split(self.layers, nnx.Param)
        return tuple(nnx.merge(graph, layer) for layer in split_layers(params))

    def extend(
        self,
        layers: Sequence[Layer],
        x: jax.Array,
        caches: Sequence[Cache],
        *,
        mask: Mask,
        positions: jax.Array | None,
        cross_mask: Mask | None,
        cross: Sequence[Cache] | None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Runs `apart()`'s layers on x [B, T, D], which follows what the caches hold; returns outputs and written caches.

        `cross` are keys and values of the encoder's output, see `cross_caches`.
        """
        bias = self._shared_bias(caches[0].key.shape[2], x, mask)
        written = []
        for number, layer in enumerate(layers):
            x, cache = layer(
                x,
                mask=mask,
                bias=bias,
                positions=positions,
                cross_mask=cross_mask,
                cross_keys_values=None if cross is None else cross[number].keys_values,
                cache=caches[number],
                dropout_key=None,
            )
            assert isinstance(cache, Cache)
            written.append(cache)
        return x if self.config.norm_position == "post" else self.final_norm(x), tuple(written)

    def caches(self, made: KeyValues, slots: int) -> tuple[Cache, ...]:
        """Caches with so many slots, of the keys and values that a run of the layers kept."""
        return tuple(self._placed(Cache.holding(layer, slots)) for layer in split_layers(made))

    def cross_caches(self, encoded: jax.Array) -> tuple[Cache, ...]:
        """Keys and values of every layer's cross-attention to `encoded` [B, S, D]."""
        made = [layer.encoder_decoder_attention.keys_values(encoded) for layer in self.apart()]
        return tuple(self._placed(Cache.holding(layer, encoded.shape[1])) for layer in made)

    def _placed(self, cache: Cache) -> Cache:
        heads = "heads" if self.config.num_kv_heads is None else "kv_heads"
        return jax.tree.map(lambda x: self.constrain(x, ("batch", heads, "whole_length", "kv")), cache)


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
    outputs = []
    for layer in split_layers(inputs):
        carry, output = body(carry, layer)
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *outputs)


def split_layers(stacked: Any) -> list[Any]:
    """The trees of single layers."""
    leaves, tree = jax.tree.flatten(stacked)
    num_layers = leaves[0].shape[0]
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [jax.tree.unflatten(tree, [pieces[layer][0] for pieces in split]) for layer in range(num_layers)]
