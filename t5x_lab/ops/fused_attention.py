"""Attention as fused kernels for TPUs (Dao et al. 2022), with T5's bias as one value per head and diagonal.

A tile has the logits of `size` keys (rows) and `size` queries (columns). It exists in the chip's vector memory only, and so
does its part of the bias, which is built from a window of the diagonals. Tiles outside of the mask are not computed.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, H head size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.masks import Mask

MASKED = -1e10
_UNLIMITED = 1 << 30
_TILES = (512, 256, 128)  # powers of 2
_LANES = 128


class Rows(NamedTuple):
    """What the kernels read beside queries, keys and values, in tiles; None for what there is not.

    Attributes:
      query_codes, key_codes: 2 * segment + is in the prefix, float [B, tiles, 1, size].
      bias: the bias by descending distance, float [N, tiles + 1, 1, size].
    """

    query_codes: jax.Array | None
    key_codes: jax.Array | None
    bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles, and which of them are computed.

    Attributes:
      T, S: number of queries and keys.
      size: number of queries and of keys in a tile.
      before, after: keys to the left and to the right of a query that it may attend to.
      is_causal: queries attend to keys on their right only in the prefix.
      has_query_segments: keys of other segments than the query's are masked; otherwise only padding.
      logit_cap: see `dot_product_attention`.
      interpret: run the kernels without a TPU, slowly, for tests.
    """

    T: int
    S: int
    size: int
    before: int
    after: int
    is_causal: bool
    has_query_segments: bool
    logit_cap: float | None
    interpret: bool

    @property
    def query_tiles(self) -> int:
        return -(-self.T // self.size)

    @property
    def key_tiles(self) -> int:
        return -(-self.S // self.size)

    def keys_of(self, query_tile: Any) -> tuple[Any, Any]:
        """Returns the first and the last tile of keys that the queries of a tile attend to."""
        return _tiles(query_tile, self.before, self.after, self.size, self.key_tiles)

    def queries_of(self, key_tile: Any) -> tuple[Any, Any]:
        """Returns the first and the last tile of queries that attend to the keys of a tile."""
        return _tiles(key_tile, self.after, self.before, self.size, self.query_tiles)

    def most_keys(self) -> int:
        """Returns the largest number of tiles that the queries of a tile attend to."""
        return max(last - first + 1 for first, last in map(self.keys_of, range(self.query_tiles)))

    def most_queries(self) -> int:
        """Returns the largest number of tiles of queries that attend to the keys of a tile."""
        return max(last - first + 1 for first, last in map(self.queries_of, range(self.key_tiles)))


def _tiles(tile: Any, before: int, after: int, size: int, tiles: int) -> tuple[Any, Any]:
    smallest, largest = (min, max) if isinstance(tile, int) else (jnp.minimum, jnp.maximum)
    last = smallest((tile * size + size - 1 + after) // size, tiles - 1)
    return smallest(largest(tile * size - before, 0) // size, largest(last, 0)), last


def can_fuse(mask: Mask) -> bool:
    """Returns whether the kernels have this mask: those of training and of prompts, but not of tokens after a cache."""
    return mask.query_offset is None and mask.key_positions is None and mask.kind is None


def fused_attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    mask: Mask,
    bias: DiagonalBias | None,
    logit_cap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention with softmax in float32 and without a scale, see `ops.attention.dot_product_attention`.

    Args:
      query_BTNH, key_BSKH, value_BSKH: queries, keys and values.
      mask: a mask for which `can_fuse` is true.
      bias: added to the logits.
      logit_cap: c replaces logits x by c * tanh(x / c) before the bias is added. None = no cap.
      interpret: run the kernels without a TPU, slowly, for tests.

    Returns:
      The attended values [B, T, N, H] in the dtype of `value_BSKH`, and the logarithms of the sums of the exponentials of the
      logits, float [B, T, N].
    """
    T, S = query_BTNH.shape[1], key_BSKH.shape[1]
    tiling = _make_tiling(T, S, mask, logit_cap, interpret)
    to_tiles = lambda x, tiles: jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, tiles * tiling.size - x.shape[1]), (0, 0)))
    query = to_tiles(query_BTNH, tiling.query_tiles)
    key, value = (to_tiles(x, tiling.key_tiles) for x in (key_BSKH, value_BSKH))
    attended, log_sums = _attention(tiling, query, key, value, _make_rows(tiling, mask, bias))
    B, N = query.shape[:2]
    return jnp.swapaxes(attended, 1, 2)[:, :T], jnp.swapaxes(log_sums.reshape(B, N, -1), 1, 2)[:, :T]


def _make_tiling(T: int, S: int, mask: Mask, logit_cap: float | None, interpret: bool) -> Tiling:
    (window,) = mask.windows
    before, after = (_UNLIMITED, _UNLIMITED) if window is None else (window.before, window.after)
    if mask.causal and mask.query_prefix is None:
        after = 0
    size = next((size for size in _TILES if -T % size + -S % size <= min(T, S) // 8), _TILES[-1])
    has_query_segments = mask.query_segments is not None
    return Tiling(T, S, size, before, after, mask.causal, has_query_segments, logit_cap, interpret)


def _make_rows(tiling: Tiling, mask: Mask, bias: DiagonalBias | None) -> Rows:
    queries = _codes(mask.query_segments, mask.query_prefix, tiling.query_tiles, tiling.size)
    keys = _codes(mask.key_segments, mask.key_prefix, tiling.key_tiles, tiling.size)
    return Rows(queries, keys, None if bias is None else _bias_rows(tiling, bias))


def _codes(segments: jax.Array | None, prefix: jax.Array | None, tiles: int, size: int) -> jax.Array | None:
    """Returns 2 * segment + is in the prefix, float [B, tiles, 1, size]. Without segments all are in segment 1."""
    if segments is None and prefix is None:
        return None
    codes = 2 * (jnp.ones_like(prefix, jnp.int32) if segments is None else segments)
    codes = codes if prefix is None else codes + prefix
    padded = jnp.pad(codes, ((0, 0), (0, tiles * size - codes.shape[1])))
    return padded.astype(jnp.float32).reshape(-1, tiles, 1, size)


def _bias_rows(tiling: Tiling, bias: DiagonalBias) -> jax.Array:
    """Returns the bias by descending distance, from that of the last key to the first query on, float [N, tiles, 1, size]."""
    N, D = bias.values.shape
    tiles, size = tiling.query_tiles + tiling.key_tiles, tiling.size
    left = tiling.query_tiles * size - bias.span  # the first value is that of distance -(span - 1)
    values = jax.lax.pad(bias.values.astype(jnp.float32), jnp.float32(0), ((0, 0, 0), (left, tiles * size - left - D, 0)))
    return values[:, ::-1].reshape(N, tiles, 1, size)


# ---- the kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(tiling: Tiling, query: jax.Array, key: jax.Array, value: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Returns the attended values [B, N, T, H] and the logarithms of sums [B, N, tiles, 1, size]. T and S fill their tiles."""
    B, N, _, H = query.shape
    size, last = tiling.size, tiling.most_keys() - 1

    def place(b, n, i, step):
        first, last = tiling.keys_of(i)
        return b, n, i, jnp.minimum(first + step, last)

    def kernel(query_ref, key_ref, value_ref, rows_ref, out_ref, log_sums_ref, largest_ref, sums_ref, attended_ref):
        i, step = pl.program_id(2), pl.program_id(3)
        first_key, last_key = tiling.keys_of(i)

        @pl.when(step == 0)
        def start():
            largest_ref[...] = jnp.full_like(largest_ref, -jnp.inf)
            sums_ref[...] = jnp.zeros_like(sums_ref)
            attended_ref[...] = jnp.zeros_like(attended_ref)

        @pl.when(first_key + step <= last_key)
        def add_tile():
            logits, _ = _logits(tiling, query_ref[0, 0], key_ref[0, 0], rows_ref, i, first_key + step)
            largest = jnp.maximum(largest_ref[...], jnp.max(logits, axis=0, keepdims=True))
            weights, scale = jnp.exp(logits - largest), jnp.exp(largest_ref[...] - largest)
            largest_ref[...] = largest
            sums_ref[...] = sums_ref[...] * scale + jnp.sum(weights, axis=0, keepdims=True)
            part = _contract(value_ref[0, 0], weights.astype(value_ref.dtype), 0, 0)
            attended_ref[...] = attended_ref[...] * scale + part

        @pl.when(step == last)
        def finish():
            out_ref[0, 0] = (attended_ref[...] / sums_ref[...]).T.astype(out_ref.dtype)
            log_sums_ref[0, 0, 0] = largest_ref[...] + jnp.log(sums_ref[...])

    return _call(
        tiling, kernel, "attention_forward", (B, N, tiling.query_tiles, last + 1), place,
        (query, key, value, rows), N // key.shape[1],
        outputs=[(value.dtype, query.shape, "query"), (jnp.float32, (B, N, tiling.query_tiles, 1, size), "sums")],
        scratch=[(1, size), (1, size), (H, size)],
    )  # fmt: skip


def _forward(tiling, query, key, value, rows):
    attended, log_sums = _attention(tiling, query, key, value, rows)
    return (attended, log_sums), (query, key, value, rows, attended, log_sums)


def _backward(tiling, residuals, d_results):
    query, key, value, rows, attended, log_sums = residuals
    d_attended, d_log_sums = d_results
    products = jnp.sum(d_attended.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)
    means = products.reshape(log_sums.shape) - d_log_sums
    inputs = (query, key, value, rows, d_attended, log_sums, means)
    d_query, d_bias = _query_gradients(tiling, *inputs)
    d_key, d_value = _key_gradients(tiling, *inputs)
    return d_query, d_key, d_value, Rows(None, None, d_bias)


_attention.defvjp(_forward, _backward)


def _query_gradients(tiling, query, key, value, rows, d_attended, log_sums, means):
    """Returns the gradients of the queries and of the bias."""
    B, N, _, H = query.shape
    last = tiling.most_keys() - 1

    def place(b, n, i, step):
        first, last = tiling.keys_of(i)
        return b, n, i, jnp.minimum(first + step, last)

    def kernel(query_ref, key_ref, value_ref, rows_ref, d_ref, log_sums_ref, means_ref, d_query_ref, *refs):
        *d_bias_refs, total_ref = refs
        i, step = pl.program_id(2), pl.program_id(3)
        first_key, last_key = tiling.keys_of(i)
        j = first_key + step

        @pl.when(step == 0)
        def start():
            total_ref[...] = jnp.zeros_like(total_ref)

        for d_bias_ref in d_bias_refs:

            @pl.when((step == 0) & (i == 0))
            def start_bias(d_bias_ref=d_bias_ref):
                d_bias_ref[...] = jnp.zeros_like(d_bias_ref)

        @pl.when(j <= last_key)
        def add_tile():
            operands = query_ref[0, 0], key_ref[0, 0], value_ref[0, 0], rows_ref, d_ref[0, 0]
            _, d_logits, d_products = _tile_gradients(tiling, *operands, log_sums_ref[0, 0, 0], means_ref[0, 0, 0], i, j)
            total_ref[...] += _contract(d_products.astype(key_ref.dtype), key_ref[0, 0], 0, 0)
            for d_bias_ref in d_bias_refs:
                sums = _diagonal_sums(d_logits)
                row = tiling.key_tiles - 1 - j + i
                for half in range(2):
                    d_bias_ref[0, 0, pl.ds(row + half, 1)] += sums[:, half * tiling.size : (half + 1) * tiling.size]

        @pl.when(step == last)
        def finish():
            d_query_ref[0, 0] = total_ref[...].astype(d_query_ref.dtype)

    outputs = [(query.dtype, query.shape, "query")]
    if rows.bias is not None:
        outputs.append((jnp.float32, (B, N, rows.bias.shape[1], tiling.size), "bias"))
    results = _call(
        tiling, kernel, "attention_query_gradients", (B, N, tiling.query_tiles, last + 1), place,
        (query, key, value, rows, d_attended, log_sums, means), N // key.shape[1], outputs, [(tiling.size, H)],
    )  # fmt: skip
    return results[0], None if rows.bias is None else jnp.sum(results[1], axis=0).reshape(rows.bias.shape)


def _key_gradients(tiling, query, key, value, rows, d_attended, log_sums, means):
    """Returns the gradients of the keys and values."""
    B, N, _, H = query.shape
    K = key.shape[1]
    group, last = N // K, tiling.most_queries() - 1

    def place(b, k, j, g, step):
        first, last = tiling.queries_of(j)
        return b, k * group + g, jnp.minimum(first + step, last), j

    def kernel(
        query_ref, key_ref, value_ref, rows_ref, d_ref, log_sums_ref, means_ref, d_key_ref, d_value_ref, key_total, value_total
    ):
        j, g, step = (pl.program_id(axis) for axis in (2, 3, 4))
        first_query, last_query = tiling.queries_of(j)
        i = first_query + step

        @pl.when((step == 0) & (g == 0))
        def start():
            key_total[...] = jnp.zeros_like(key_total)
            value_total[...] = jnp.zeros_like(value_total)

        @pl.when(i <= last_query)
        def add_tile():
            operands = query_ref[0, 0], key_ref[0, 0], value_ref[0, 0], rows_ref, d_ref[0, 0]
            weights, _, d_products = _tile_gradients(tiling, *operands, log_sums_ref[0, 0, 0], means_ref[0, 0, 0], i, j)
            value_total[...] += _contract(weights.astype(d_ref.dtype), d_ref[0, 0], 1, 0)
            key_total[...] += _contract(d_products.astype(query_ref.dtype), query_ref[0, 0], 1, 0)

        @pl.when((step == last) & (g == group - 1))
        def finish():
            d_key_ref[0, 0] = key_total[...].astype(d_key_ref.dtype)
            d_value_ref[0, 0] = value_total[...].astype(d_value_ref.dtype)

    return _call(
        tiling, kernel, "attention_key_gradients", (B, K, tiling.key_tiles, group, last + 1), place,
        (query, key, value, rows, d_attended, log_sums, means), group,
        outputs=[(key.dtype, key.shape, "key"), (value.dtype, value.shape, "key")],
        scratch=[(tiling.size, H), (tiling.size, H)],
    )  # fmt: skip


def _call(tiling, kernel, name, grid, place, inputs, group, outputs, scratch):
    """Calls a kernel on tiles of the inputs.

    Args:
      tiling: sizes of the tiles.
      kernel: function of references to the inputs, the outputs and the scratch memory.
      name: name in profiles.
      grid: sizes of the grid. The first two axes are independent.
      place: function from indices of the grid to row, head, tile of queries and tile of keys.
      inputs: queries, keys, values, `Rows`, and of backward kernels the gradient of the result, its sums and means.
      group: query heads for each head of keys and values.
      outputs: dtype, shape and kind of each output: "query", "key", "sums" or "bias".
      scratch: shapes of scratch memory, float32.
    """
    query, _, _, rows, *more = inputs
    size, H = tiling.size, query.shape[-1]

    def spec(shape: tuple[int, ...], index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *ids: index(*place(*ids)))

    tile = (1, 1, size, H)
    of_query = spec(tile, lambda b, n, i, j: (b, n, i, 0))
    of_key = spec(tile, lambda b, n, i, j: (b, n // group, j, 0))
    of_sums = spec((1, 1, 1, 1, size), lambda b, n, i, j: (b, n, i, 0, 0))
    of_bias = spec((1, 1, tiling.query_tiles + tiling.key_tiles, size), lambda b, n, i, j: (b, n, 0, 0))
    specs = {"query": of_query, "key": of_key, "sums": of_sums, "bias": of_bias}
    row, shifted = (1, 1, 1, size), lambda shift: lambda b, n, i, j: (n, tiling.key_tiles - 1 - j + i + shift, 0, 0)
    rows_specs = [
        None if rows.query_codes is None else spec(row, lambda b, n, i, j: (b, i, 0, 0)),
        None if rows.key_codes is None else spec(row, lambda b, n, i, j: (b, j, 0, 0)),
        None if rows.bias is None else [spec(row, shifted(0)), spec(row, shifted(1))],
    ]
    in_rows = [rows.query_codes, rows.key_codes, None if rows.bias is None else [rows.bias, rows.bias]]
    in_specs = [of_query, of_key, of_key, rows_specs, *[of_query, of_sums, of_sums][: len(more)]]
    semantics = ("parallel", "parallel", *["arbitrary"] * (len(grid) - 2))
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype, shape, _ in outputs],
        grid=grid,
        in_specs=in_specs,
        out_specs=[specs[kind] for _, _, kind in outputs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=tiling.interpret,
        name=name,
    )(query, inputs[1], inputs[2], in_rows, *more)


# ---- one tile


def _logits(tiling: Tiling, query, key, rows_ref, i, j) -> tuple[jax.Array, jax.Array | None]:
    """Returns the masked logits of a tile, float [keys, queries], and tanh(x / cap) if there is a cap."""
    query_codes_ref, key_codes_ref, bias_refs = rows_ref
    logits, tanh = _contract(key, query, 1, 1), None
    if tiling.logit_cap is not None:
        tanh = jnp.tanh(logits / tiling.logit_cap)
        logits = tanh * tiling.logit_cap
    if bias_refs is not None:
        logits += _toeplitz(jnp.concatenate([ref[0, 0] for ref in bias_refs], axis=1))
    key_positions = j * tiling.size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    query_positions = i * tiling.size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    rules = [key_positions < tiling.S] if tiling.S % tiling.size else []
    queries = None if query_codes_ref is None else query_codes_ref[0, 0].astype(jnp.int32)
    keys = None if key_codes_ref is None else _column(key_codes_ref[0, 0]).astype(jnp.int32)
    if tiling.is_causal:
        is_left = key_positions <= query_positions
        if tiling.after > 0 and queries is not None and keys is not None:
            is_left |= (queries & keys & 1) == 1
        rules.append(is_left)
    if tiling.before < _UNLIMITED:
        rules.append(key_positions >= query_positions - tiling.before)
    if 0 < tiling.after < _UNLIMITED or (tiling.after == 0 and not tiling.is_causal):
        rules.append(key_positions <= query_positions + tiling.after)
    if keys is not None:
        rules.append(keys >= 2)
        if tiling.has_query_segments:
            assert queries is not None
            rules.append((queries >> 1) == (keys >> 1))
    if rules:
        logits = jnp.where(functools.reduce(jnp.logical_and, rules), logits, MASKED)
    return logits, tanh


def _tile_gradients(tiling: Tiling, query, key, value, rows_ref, d_attended, log_sums, means, i, j):
    """Returns weights, and gradients of the logits and of the products of queries and keys, float [keys, queries]."""
    logits, tanh = _logits(tiling, query, key, rows_ref, i, j)
    weights = jnp.exp(logits - log_sums)
    d_logits = weights * (_contract(value, d_attended, 1, 1) - means)
    return weights, d_logits, d_logits if tanh is None else d_logits * (1.0 - tanh * tanh)


def _contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Returns the product of two matrices over an axis of each, in float32."""
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _column(row: jax.Array) -> jax.Array:
    """Returns a row [1, size] as a column [size, 1]."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _toeplitz(window: jax.Array) -> jax.Array:
    """Returns the tile [size, size] with entry window[size + t - s] in row s and column t, of a window [1, 2 * size].

    Row s is the window rolled by s: the rows are doubled until there are `size` of them.
    """
    size = window.shape[1] // 2
    rolled = window
    while rolled.shape[0] < size:
        rolled = jnp.concatenate([rolled, pltpu.roll(rolled, rolled.shape[0], 1)], axis=0)
    return rolled[:, size:]


def _diagonal_sums(tile: jax.Array) -> jax.Array:
    """Returns the sums over the diagonals of a tile: the transpose of `_toeplitz`, float [1, 2 * size].

    The lower half of the rows is rolled back and added to the upper one until one row is left.
    """
    size = tile.shape[0]
    rolled = jnp.concatenate([jnp.zeros_like(tile), tile], axis=1)
    while rolled.shape[0] > 1:
        half = rolled.shape[0] // 2
        rolled = rolled[:half] + pltpu.roll(rolled[half:], 2 * size - half, 1)
    return rolled
