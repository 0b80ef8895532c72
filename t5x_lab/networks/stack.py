"""A stack of layers with parameters of the same shapes, run as a scan or unrolled, with remat. The parameters have a leading
`layers` axis.

Axis letters: B batch, T length, S cache slots, K heads of keys and values, H head size, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.attention import MultiHeadAttention
from t5x_lab.networks.cache import Cache, KeyValues
from t5x_lab.networks.config import REMAT_POLICIES, TransformerShape
from t5x_lab.networks.global_tokens import TokenBlocks, make_token_blocks
from t5x_lab.networks.layers import Mlp, gather, make_norm, scatter
from t5x_lab.networks.positions import RelativeBias, positions_from_end
from t5x_lab.networks.rotary import Rotation
from t5x_lab.networks.stacked import make_stacked
from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.dropout import dropout
from t5x_lab.ops.masks import Mask


class GlobalBlocks(NamedTuple):
    """Blocks of tokens whose sums the layers of an encoder attend to, with the mask and the bias."""

    tokens: TokenBlocks
    mask: Mask
    bias: DiagonalBias


class Layer(nnx.Module):
    """Self-attention, optional cross-attention, and MLP, each with a norm."""

    def __init__(self, config: TransformerShape, *, cross: bool, constrain: Callable, rngs: nnx.Rngs):
        self.config, self.constrain = config, constrain
        self.self_attention = MultiHeadAttention(config, constrain=constrain, rngs=rngs)
        self.self_attention_norm = make_norm(config)
        self.has_own_bias = config.positions == "relative" and config.relative_bias == "per_layer"
        if self.has_own_bias:
            self.relpos_bias = make_relative_bias(config, rngs)
        if config.global_block_size is not None:
            self.global_norm = make_norm(config)
        self.has_cross_attention = cross and not config.merged_attention
        if self.has_cross_attention:
            source_dim = config.encoder_shape.emb_dim
            self.cross_attention = MultiHeadAttention(config, source_dim, constrain=constrain, rngs=rngs)
            self.cross_attention_norm = make_norm(config)
        self.mlp = Mlp(config, constrain=constrain, rngs=rngs)
        self.mlp_norm = make_norm(config)
        if config.norm_position == "both":
            self.self_attention_output_norm, self.mlp_output_norm = make_norm(config), make_norm(config)
            if self.has_cross_attention:
                self.cross_attention_output_norm = make_norm(config)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask,
        bias: DiagonalBias | None,
        rotation: Rotation | None,
        cross_mask: Mask | None,
        cross_keys_values: KeyValues | None,
        cache: Cache | None,
        dropout_key: jax.Array | None,
        global_blocks: GlobalBlocks | None = None,
    ) -> tuple[jax.Array, KeyValues | Cache]:
        """Returns the output [B, T, D], and keys and values; with a cache, the updated cache."""
        keys = [None] * 6 if dropout_key is None else list(jax.random.split(dropout_key, 6))

        y = self._sublayer_input("self_attention", x)
        keys_values = self.self_attention.keys_values(y, rotation)
        state: KeyValues | Cache = keys_values
        if cache is not None:
            keys_values, mask, state = cache.extend(keys_values, mask)
        if self.has_own_bias:
            slots = keys_values.key.shape[1]
            bias = self.relpos_bias(slots, slots, bidirectional=has_bidirectional_bias(self.config, mask))
        memory: tuple[KeyValues, Mask, DiagonalBias | None] | None = None
        if cross_keys_values is not None and not self.has_cross_attention:
            assert cross_mask is not None
            memory = cross_keys_values, cross_mask, None
        if global_blocks is not None:
            sums = self.global_norm(global_blocks.tokens.sum_tokens(y))
            memory = self.self_attention.keys_values(sums), global_blocks.mask, global_blocks.bias
        y = self.self_attention(y, keys_values, mask=mask, bias=bias, rotation=rotation, memory=memory, dropout_key=keys[0])
        x = self._add_sublayer("self_attention", x, y, keys[1])

        if cross_keys_values is not None and self.has_cross_attention:
            assert cross_mask is not None
            y = self._sublayer_input("cross_attention", x)
            turn = rotation if self.config.rotary_cross_attention else None
            y = self.cross_attention(y, cross_keys_values, mask=cross_mask, rotation=turn, dropout_key=keys[2])
            x = self._add_sublayer("cross_attention", x, y, keys[3])

        y = self.mlp(self._sublayer_input("mlp", x), dropout_key=keys[4])
        return self._add_sublayer("mlp", x, y, keys[5]), state

    def encoder_keys_values(self, encoded: jax.Array, rotation: Rotation | None) -> KeyValues:
        """Returns the keys and values [B, S, K, H] of the encoder's output [B, S, D]."""
        attention = self.cross_attention if self.has_cross_attention else self.self_attention
        return attention.keys_values(gather(encoded, self.constrain), rotation)

    def _sublayer_input(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the input of a sub-layer."""
        y = getattr(self, f"{name}_norm")(x) if self.config.norm_position in ("pre", "both") else x
        return gather(y, self.constrain)

    def _add_sublayer(self, name: str, x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
        """Adds the output y of a sub-layer to the residual x."""
        norm, position = getattr(self, f"{name}_norm"), self.config.norm_position
        y = norm(y) if position == "output" else y
        y = getattr(self, f"{name}_output_norm")(y) if position == "both" else y
        y = checkpoint_name(scatter(y, self.constrain), "sublayers")
        x = x + dropout(y, self.config.dropout_rate, key)
        return norm(x) if position == "post" else x


class Stack(nnx.Module):
    """`num_layers` layers with a final norm (except post-norm) and the shared relative bias, if any."""

    def __init__(self, config: TransformerShape, num_layers: int, *, cross: bool, constrain, rngs: nnx.Rngs):
        self.layers = make_stacked(lambda rngs: Layer(config, cross=cross, constrain=constrain, rngs=rngs), num_layers, rngs)
        if config.norm_position != "post":
            self.final_norm = make_norm(config)
        self.has_shared_bias = config.positions == "relative" and config.relative_bias == "shared"
        if self.has_shared_bias:
            self.relpos_bias = make_relative_bias(config, rngs)
        if config.global_block_size is not None:
            self.global_relpos_bias = make_relative_bias(config, rngs)
        self.config, self.num_layers, self.constrain = config, num_layers, constrain
        self.kinds = config.kinds_of_layers(num_layers)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask,
        positions: jax.Array | None = None,
        cross_mask: Mask | None = None,
        encoded: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        keep_keys_values: bool = False,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Runs the layers on x [B, T, D].

        Args:
          x: token embeddings.
          mask: mask of self-attention.
          positions: positions for rotary attention, int [B or 1, T]. None = no rotation.
          cross_mask: mask of cross-attention.
          encoded: encoder output [B, S, D]. None = no cross-attention.
          dropout_key: None = no dropout.
          keep_keys_values: return the keys and values of self-attention.

        Returns:
          Output [B, T, D], and keys and values [layers, B, T, K, H] or None.
        """
        c = self.config
        bias = self._shared_bias(x.shape[1], mask)
        global_blocks = self._global_blocks(mask)
        encoded_positions = self._encoded_positions(cross_mask)
        graph, params = nnx.split(self.layers, nnx.Param)
        keys = None if dropout_key is None else jax.random.split(dropout_key, self.num_layers + 2)
        if keys is not None:
            x = dropout(x, c.dropout_rate, keys[-2])

        def run_layer(x, layer_params, key, kind):
            layer = nnx.merge(graph, layer_params)
            cross_keys_values = None
            if encoded is not None:
                cross_keys_values = layer.encoder_keys_values(encoded, self._rotation(encoded_positions, kind))
            x, keys_values = layer(
                x,
                mask=self._mask(mask, kind),
                bias=bias,
                rotation=self._rotation(positions, kind),
                cross_mask=cross_mask,
                cross_keys_values=cross_keys_values,
                cache=None,
                dropout_key=key,
                global_blocks=global_blocks,
            )
            return self.constrain(x, ("batch", "length", None)), keys_values if keep_keys_values else None

        x, keys_values = self._run_layers(
            run_layer, self.constrain(x, ("batch", "length", None)), params, None if keys is None else keys[: self.num_layers]
        )
        if c.norm_position == "post":
            return x, keys_values  # the last sub-layer has applied norm and dropout
        return dropout(self.final_norm(x), c.dropout_rate, None if keys is None else keys[-1]), keys_values

    def _run_layers(self, run_layer: Callable, x: jax.Array, params: Any, keys: jax.Array | None) -> tuple[jax.Array, Any]:
        """Runs `run_layer(x, params, key, kind)`, which returns x and another result, over the layers.

        In a scan the kind is an array, unless there is only one. All kinds have one traced layer, in which attention is traced
        once for each different window, so that compile time does not depend on the depth.
        """
        saved = REMAT_POLICIES[self.config.remat_policy]
        policy = None if saved is None else jax.checkpoint_policies.save_only_these_names(*saved)
        with_remat = lambda run: (
            run if saved is None else jax.checkpoint(run, policy=policy, prevent_cse=not self.config.scan_layers)
        )
        if self.config.scan_layers:
            kinds = None if len(self.config.kinds) == 1 else jnp.asarray(self.kinds)
            step = lambda x, inputs: run_layer(x, *inputs[:2], 0 if inputs[2] is None else inputs[2])
            return jax.lax.scan(with_remat(step), x, (params, keys, kinds))
        outputs = []
        for kind, (layer_params, key) in zip(self.kinds, unstack_tree((params, keys)), strict=True):
            x, output = with_remat(functools.partial(run_layer, kind=kind))(x, layer_params, key)
            outputs.append(output)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    def _mask(self, mask: Mask, kind: int | jax.Array) -> Mask:
        """Returns the mask of a kind of layer, given by its index, which may be an array."""
        windows = [each.mask_window(mask.causal) for each in self.config.kinds]
        if isinstance(kind, int):
            return dataclasses.replace(mask, windows=(windows[kind],))
        different = tuple(dict.fromkeys(windows))
        if len(different) == 1:
            return dataclasses.replace(mask, windows=different)
        index = jnp.asarray([different.index(window) for window in windows])
        return dataclasses.replace(mask, windows=different, kind=index[kind])

    def _rotation(self, positions: jax.Array | None, kind: int | jax.Array) -> Rotation | None:
        """Returns the rotation of a kind of layer; None without positions."""
        if positions is None:
            return None
        c = self.config
        rotations = [each.rotation(c.head_dim, c.rotary_theta, c.rotary_scaling) for each in c.kinds]
        if isinstance(kind, int):
            return Rotation(positions, *rotations[kind])
        rates, factors = (jnp.asarray(np.stack(each), jnp.float32) for each in zip(*rotations))
        return Rotation(positions, rates[kind], factors[kind])

    def _encoded_positions(self, cross_mask: Mask | None) -> jax.Array | None:
        """Returns the positions of the encoder's output in rotary cross-attention, int [B, S]; None without it.

        The decoder's positions start at 0, so that those of the encoder are below 0.
        """
        if not self.config.rotary_cross_attention or cross_mask is None:
            return None
        assert cross_mask.key_segments is not None
        return positions_from_end(cross_mask.key_segments)

    def _shared_bias(self, length: int, mask: Mask) -> DiagonalBias | None:
        if not self.has_shared_bias:
            return None
        return self.relpos_bias(length, length, bidirectional=has_bidirectional_bias(self.config, mask))

    def _global_blocks(self, mask: Mask) -> GlobalBlocks | None:
        """Returns the blocks of an encoder's tokens whose sums its layers attend to; None if there are none."""
        size = self.config.global_block_size
        if size is None:
            return None
        assert mask.query_segments is not None
        tokens = make_token_blocks(mask.query_segments, size)
        num_blocks = tokens.segments_BG.shape[1]
        if num_blocks == 0:
            return None
        bias = self.global_relpos_bias(num_blocks, num_blocks, bidirectional=True)
        return GlobalBlocks(tokens, tokens.mask(mask.query_segments), bias)

    # Decoding unrolls the layers: a scan would copy each layer's parameters and cache in every step.

    def unstack(self) -> tuple[Layer, ...]:
        """Returns the layers as separate modules. A loop over tokens calls this once before the loop."""
        graph, params = nnx.split(self.layers, nnx.Param)
        return tuple(nnx.merge(graph, layer) for layer in unstack_tree(params))

    def decode(
        self,
        layers: Sequence[Layer],
        x: jax.Array,
        caches: Sequence[Cache],
        *,
        mask: Mask,
        positions: jax.Array | None,
        cross_mask: Mask | None,
        cross_caches: Sequence[Cache] | None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Runs unstacked layers on x [B, T, D], the tokens after those in the caches.

        Args:
          layers: result of `unstack`.
          x: token embeddings.
          caches: cache of each layer.
          mask: mask of self-attention.
          positions: positions for rotary attention. None = no rotation.
          cross_mask: mask of cross-attention.
          cross_caches: result of `make_cross_caches`. None = no cross-attention.

        Returns:
          Output [B, T, D] and the updated caches.
        """
        bias = self._shared_bias(max(cache.slots for cache in caches), mask)

        @functools.partial(jax.jit, static_argnums=0)  # traced once for all layers of a kind
        def run_layer(kind: int, layer: Layer, x: jax.Array, cache: Cache, cross: Cache | None) -> tuple[jax.Array, Any]:
            return layer(
                x,
                mask=self._mask(mask, kind),
                bias=bias,
                rotation=self._rotation(positions, kind),
                cross_mask=cross_mask,
                cross_keys_values=None if cross is None else cross.keys_values,
                cache=cache,
                dropout_key=None,
            )

        updated: list[Cache] = []
        encoder_caches: Sequence[Cache | None] = cross_caches or [None] * len(caches)
        for kind, layer, cache, cross_cache in zip(self.kinds, layers, caches, encoder_caches, strict=True):
            x, cache = run_layer(kind, layer, x, cache, cross_cache)
            updated.append(cache)
        return x if self.config.norm_position == "post" else self.final_norm(x), tuple(updated)

    def make_caches(self, keys_values: KeyValues, slots: int, lengths_B: jax.Array) -> tuple[Cache, ...]:
        """Returns a cache for each layer with the keys and values [layers, B, T, K, H] of a stack.

        Args:
          keys_values: keys and values.
          slots: number of positions. A local layer has as many slots as its window, if these are fewer.
          lengths_B: lengths of the rows.
        """
        caches = []
        for kind, layer in zip(self.kinds, unstack_tree(keys_values), strict=True):
            window = self.config.kinds[kind].window or slots
            is_local = window < slots
            caches.append(Cache.of_window(layer, window, lengths_B) if is_local else Cache.filled(layer, slots))
        return tuple(map(self._shard, caches))

    def make_cross_caches(self, encoded: jax.Array, cross_mask: Mask) -> tuple[Cache, ...]:
        """Returns a cache for each layer with the cross-attention keys and values of `encoded` [B, S, D]."""
        positions = self._encoded_positions(cross_mask)
        rotations = [self._rotation(positions, kind) for kind in self.kinds]
        keys_values = [layer.encoder_keys_values(encoded, turn) for layer, turn in zip(self.unstack(), rotations, strict=True)]
        return tuple(self._shard(Cache.filled(layer, encoded.shape[1])) for layer in keys_values)

    def _shard(self, cache: Cache) -> Cache:
        heads = "heads" if self.config.num_kv_heads is None else "kv_heads"
        return jax.tree.map(lambda x: self.constrain(x, ("batch", heads, None, None)), cache)


def make_relative_bias(config: TransformerShape, rngs: nnx.Rngs) -> RelativeBias:
    return RelativeBias(config.num_heads, config.relpos_buckets, config.relpos_max_distance, rngs=rngs)


def has_bidirectional_bias(config: TransformerShape, mask: Mask) -> bool:
    """Returns whether buckets distinguish left from right: in an encoder, and in a decoder if configured."""
    return not mask.causal or config.bidirectional_bias


def unstack_tree(stacked: Any) -> list[Any]:
    """Returns the tree of each layer from a tree whose leaves have a leading `layers` axis.

    The transpose of a split is a concatenation, which is cheaper than that of indexing.
    """
    leaves, tree = jax.tree.flatten(stacked)
    num_layers = leaves[0].shape[0]
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [jax.tree.unflatten(tree, [pieces[layer][0] for pieces in split]) for layer in range(num_layers)]
