"""Kernels of attention for TPUs: the forward pass, and the gradients of the queries and the bias, and of the keys and values.

A tile has the logits of keys (rows) and queries (columns). It exists in the chip's vector memory only, and so does its part of
the bias, which is built from a window of the diagonals (Dao et al. 2022, here with T5's biases). The kernels read arrays by
their names: "query", "key" and "value" [B, heads, H, length], rows "query_codes", "key_codes" and "bias" if any,
and in the backward pass "d_attended", "log_sums" and "means".

Axis letters: B batch, N heads, K heads of keys and values, H head size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.kernels.tiling import Tiling

INTERPRET = False  # tests run the kernels without a TPU, slowly
SIZES = (512, 256, 128)
_MASKED = -1e10
_LANES = 128
Arrays = Mapping[str, jax.Array]

HEADS = 1  # the axis of heads in queries, keys and values
KEY_GRADIENTS = ("query", "query")  # the axes of their results: a part for each query head
AXES: Mapping[str, tuple] = {
    **dict.fromkeys(("query", "d_attended"), ("batch", "heads", None, None)),
    **dict.fromkeys(("key", "value"), ("batch", "kv_heads", None, None)),
    **dict.fromkeys(("query_codes", "key_codes"), ("batch", None, None, None)),
    "bias": ("heads", None, None, None),
    **dict.fromkeys(("log_sums", "means", "d_bias"), ("batch", "heads", None, None, None)),
}


# ---- layout


def lay_out(x: jax.Array, size: int) -> jax.Array:
    """Returns [B, T, N, H] as [B, N, H, T], with zeros to fill the last tile.

    The compiler for TPUs has the length last too if heads are small. A head of 64, as in T5, would take the space of 128.
    """
    return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0))), 1, 3)


def restore(x: jax.Array, length: int) -> jax.Array:
    """Returns [B, N, H, T] as [B, T, N, H], up to a length."""
    return jnp.moveaxis(x, 3, 1)[:, :length]


def lay_out_rows(x_BTN: jax.Array, size: int) -> jax.Array:
    """Returns a number for each query and head as [B, N, tiles, 1, size]."""
    B, T, N = x_BTN.shape
    return jnp.swapaxes(jnp.pad(x_BTN, ((0, 0), (0, -T % size), (0, 0))), 1, 2).reshape(B, N, -1, 1, size)


def restore_rows(x: jax.Array, length: int) -> jax.Array:
    """Returns [B, N, tiles, 1, size] as [B, T, N], up to a length."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2)[:, :length]


def lay_out_codes(codes_BT: jax.Array, size: int) -> jax.Array:
    """Returns codes of tokens as float [B, tiles, 1, size], with 0, padding, to fill the last tile."""
    padded = jnp.pad(codes_BT, ((0, 0), (0, -codes_BT.shape[1] % size)))
    return padded.astype(jnp.float32).reshape(padded.shape[0], -1, 1, size)


def lay_out_bias(tiling: Tiling, bias: DiagonalBias) -> jax.Array:
    """Returns the bias by descending distance of key - query, float [N, query tiles + key tiles, 1, size].

    The first value is that of distance size * key tiles.
    """
    N, D = bias.values.shape
    tiles, size = tiling.query_tiles + tiling.key_tiles, tiling.size
    before = tiling.query_tiles * size - bias.span  # the bias starts with distance -(span - 1)
    values = jax.lax.pad(bias.values.astype(jnp.float32), jnp.float32(0), ((0, 0, 0), (before, tiles * size - before - D, 0)))
    return values[:, ::-1].reshape(N, tiles, 1, size)


# ---- kernels


class _Visit(NamedTuple):
    """A step of a kernel's grid: a tile of queries with one of keys.

    Attributes:
      i, j: tile of queries and tile of keys.
      is_first, is_last: it is the first or last visit of the tile whose result is summed up.
      is_allowed: some query may attend to some key.
    """

    i: Any
    j: Any
    is_first: Any
    is_last: Any
    is_allowed: Any


def attend(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the attended values [B, N, H, length], and the logarithms of the sums of exponentials [B, N, tiles, 1, size]."""
    B, N, H, _ = inputs["query"].shape

    def kernel(inputs, outputs, scratch, visit: _Visit):
        largest_ref, sums_ref, attended_ref = scratch

        @pl.when(visit.is_first)
        def start():
            largest_ref[...] = jnp.full_like(largest_ref, -jnp.inf)
            sums_ref[...] = jnp.zeros_like(sums_ref)
            attended_ref[...] = jnp.zeros_like(attended_ref)

        @pl.when(visit.is_allowed)
        def add_tile():
            logits, _ = _logits(tiling, inputs, visit)
            largest = jnp.maximum(largest_ref[...], jnp.max(logits, axis=0, keepdims=True))
            weights, scale = jnp.exp(logits - largest), jnp.exp(largest_ref[...] - largest)
            value = inputs["value"][0, 0]
            largest_ref[...] = largest
            sums_ref[...] = sums_ref[...] * scale + jnp.sum(weights, axis=0, keepdims=True)
            attended_ref[...] = attended_ref[...] * scale + _contract(value, weights.astype(value.dtype), 1, 0)

        @pl.when(visit.is_last)
        def finish():
            outputs[0][0, 0] = (attended_ref[...] / sums_ref[...]).astype(outputs[0].dtype)
            outputs[1][0, 0, 0] = largest_ref[...] + jnp.log(sums_ref[...])

    query, sums = inputs["query"].shape, (B, N, tiling.query_tiles, 1, tiling.size)
    outputs = [("query", query, inputs["value"].dtype), ("log_sums", sums, jnp.float32)]
    scratch = [(1, tiling.size), (1, tiling.size), (H, tiling.size)]
    return _call("attention", tiling, kernel, "keys", inputs, outputs, scratch)


def gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the gradients of queries, of keys and values for each query head, and if there is a bias of each row's values.

    The last is float [B, N, query tiles + key tiles, 1, size].
    """
    d_query, *of_bias = _query_gradients(tiling, inputs)
    return [d_query, *_key_gradients(tiling, inputs), *(x[:, :, :, None] for x in of_bias)]


def _query_gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the gradient of the queries, and if there is a bias that of its rows, float [B, N, tiles, size]."""
    B, N, H, _ = inputs["query"].shape

    def kernel(inputs, outputs, scratch, visit: _Visit):
        (d_query_ref, *d_bias_refs), (total_ref,) = outputs, scratch

        @pl.when(visit.is_first)
        def start():
            total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when(visit.is_first & (visit.i == 0))
        def start_bias():
            for ref in d_bias_refs:
                ref[...] = jnp.zeros_like(ref)

        @pl.when(visit.is_allowed)
        def add_tile():
            _, d_logits, d_products = _tile_gradients(tiling, inputs, visit)
            key = inputs["key"][0, 0]
            total_ref[...] += _contract(key, d_products.astype(key.dtype), 1, 0)
            for ref in d_bias_refs:
                sums, row = _diagonal_sums(d_logits), _bias_row(tiling, visit.i, visit.j)
                ref[0, 0, pl.ds(row, 1)] += sums[:, : tiling.size]
                ref[0, 0, pl.ds(row + 1, 1)] += sums[:, tiling.size :]

        @pl.when(visit.is_last)
        def finish():
            d_query_ref[0, 0] = total_ref[...].astype(d_query_ref.dtype)

    outputs = [("query", inputs["query"].shape, inputs["query"].dtype)]
    if "bias" in inputs:
        outputs.append(("d_bias", (B, N, tiling.query_tiles + tiling.key_tiles, tiling.size), jnp.float32))
    return _call("attention_query_gradients", tiling, kernel, "keys", inputs, outputs, [(H, tiling.size)])


def _key_gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the parts of the gradients of the keys and values that each query head adds, [B, N, H, length]."""
    B, N, H, _ = inputs["query"].shape

    def kernel(inputs, outputs, scratch, visit: _Visit):
        @pl.when(visit.is_first)
        def start():
            for ref in scratch:
                ref[...] = jnp.zeros_like(ref)

        @pl.when(visit.is_allowed)
        def add_tile():
            weights, _, d_products = _tile_gradients(tiling, inputs, visit)
            query, d_attended = inputs["query"][0, 0], inputs["d_attended"][0, 0]
            scratch[0][...] += _contract(query, d_products.astype(query.dtype), 1, 1)
            scratch[1][...] += _contract(d_attended, weights.astype(d_attended.dtype), 1, 1)

        @pl.when(visit.is_last)
        def finish():
            for output, total in zip(outputs, scratch):
                output[0, 0] = total[...].astype(output.dtype)

    shape = (B, N, *inputs["key"].shape[2:])
    is_sum = inputs["key"].shape[1] < N  # of several heads, in float32
    outputs = [("d_key", shape, jnp.float32 if is_sum else inputs[name].dtype) for name in ("key", "value")]
    return _call("attention_key_gradients", tiling, kernel, "queries", inputs, outputs, [(H, tiling.size)] * 2)


def _call(
    name: str,
    tiling: Tiling,
    kernel: Callable,
    visits: str,
    inputs: Arrays,
    outputs: Sequence[tuple[str, tuple[int, ...], Any]],
    scratch: Sequence[tuple[int, int]],
) -> list[jax.Array]:
    """Calls a kernel with references to tiles of the inputs, by name, to tiles of the outputs, and to scratch memory.

    Args:
      name: name in profiles.
      tiling: sizes of the tiles.
      kernel: function of references by name, of those to outputs and scratch memory, and of a visit.
      visits: "keys": each tile of queries visits the tiles of keys that it attends to; "queries": each tile of keys those of
        queries that attend to it.
      inputs: see the module.
      outputs: kind, shape and dtype of each output.
      scratch: shapes of scratch memory, float32.
    """
    H, group = inputs["query"].shape[2], inputs["query"].shape[1] // inputs["key"].shape[1]
    size, bias_tiles = tiling.size, tiling.query_tiles + tiling.key_tiles

    is_over_keys = visits == "keys"
    tiles, steps, range_of = (
        (tiling.query_tiles, tiling.most_keys(), tiling.keys_of)
        if is_over_keys
        else (tiling.key_tiles, tiling.most_queries(), tiling.queries_of)
    )

    def place(b, n, tile, step):
        first, last = range_of(tile)
        other = jnp.minimum(first + step, last)
        return (b, n, tile, other) if is_over_keys else (b, n, other, tile)

    def spec(shape: tuple[int, ...], index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *ids: index(*place(*ids)))

    of_query = spec((1, 1, H, size), lambda b, n, i, j: (b, n, 0, i))
    of_key = spec((1, 1, H, size), lambda b, n, i, j: (b, jax.lax.div(n, group), 0, j))
    of_sums = spec((1, 1, 1, 1, size), lambda b, n, i, j: (b, n, i, 0, 0))
    bias_row = lambda shift: spec((1, 1, 1, size), lambda b, n, i, j: (n, _bias_row(tiling, i, j) + shift, 0, 0))
    specs = {
        "query": of_query, "d_attended": of_query, "key": of_key, "value": of_key, "log_sums": of_sums, "means": of_sums,
        "query_codes": spec((1, 1, 1, size), lambda b, n, i, j: (b, i, 0, 0)),
        "key_codes": spec((1, 1, 1, size), lambda b, n, i, j: (b, j, 0, 0)),
        "bias": bias_row(0), "next_bias": bias_row(1),
        "d_key": spec((1, 1, H, size), lambda b, n, i, j: (b, n, 0, j)),
        "d_bias": spec((1, 1, bias_tiles, size), lambda b, n, i, j: (b, n, 0, 0)),
    }  # fmt: skip
    if "bias" in inputs:
        inputs = {**inputs, "next_bias": inputs["bias"]}
    names, count = list(inputs), len(outputs)
    grid = (*inputs["query"].shape[:2], tiles, steps)
    semantics: Any = ("parallel", "parallel", "arbitrary", "arbitrary")

    def with_names(*refs):
        tile, step = pl.program_id(2), pl.program_id(3)
        first, last = range_of(tile)
        other = first + step
        i, j = (tile, other) if is_over_keys else (other, tile)
        visit = _Visit(i, j, step == 0, step == steps - 1, other <= last)
        kernel(dict(zip(names, refs)), refs[len(names) : len(names) + count], refs[len(names) + count :], visit)

    return pl.pallas_call(
        with_names,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
        grid=grid,
        in_specs=[specs[name] for name in names],
        out_specs=[specs[kind] for kind, _, _ in outputs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=INTERPRET,
        name=name,
    )(*inputs.values())


def _bias_row(tiling: Tiling, query_tile: Any, key_tile: Any) -> Any:
    """Returns the first of the two rows of `lay_out_bias` that have the bias of a tile."""
    return tiling.key_tiles - 1 - key_tile + query_tile


# ---- one tile


def _logits(tiling: Tiling, inputs: Mapping[str, Any], visit: _Visit) -> tuple[jax.Array, jax.Array | None]:
    """Returns the masked logits of a tile, float [keys, queries], and tanh(x / cap) if there is a cap."""
    logits, tanh = _contract(inputs["key"][0, 0], inputs["query"][0, 0], 0, 0), None
    if tiling.logit_cap is not None:
        tanh = jnp.tanh(logits / tiling.logit_cap)
        logits = tanh * tiling.logit_cap
    if "bias" in inputs:
        logits += _toeplitz(jnp.concatenate([inputs["bias"][0, 0], inputs["next_bias"][0, 0]], axis=1))
    keys = visit.j * tiling.size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    queries = visit.i * tiling.size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    key_codes: Any = _column(inputs["key_codes"][0, 0]).astype(jnp.int32) if "key_codes" in inputs else None
    query_codes: Any = inputs["query_codes"][0, 0].astype(jnp.int32) if "query_codes" in inputs else None
    allowed = tiling.allowed(keys, queries, key_codes, query_codes)
    logits = logits if allowed is None else jnp.where(allowed, logits, _MASKED)
    return logits, tanh


def _tile_gradients(tiling: Tiling, inputs: Mapping[str, Any], visit: _Visit) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the weights, and the gradients of logits and of products of queries and keys, float [keys, queries]."""
    logits, tanh = _logits(tiling, inputs, visit)
    weights = jnp.exp(logits - inputs["log_sums"][0, 0, 0])
    d_weights = _contract(inputs["value"][0, 0], inputs["d_attended"][0, 0], 0, 0)
    d_logits = weights * (d_weights - inputs["means"][0, 0, 0])
    return weights, d_logits, d_logits if tanh is None else d_logits * (1.0 - tanh * tanh)


def _contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Returns the product of two matrices over an axis of each, in float32."""
    axes = (((x_axis,), (y_axis,)), ((), ()))
    # JAX's setting of a higher precision is for float32. The TPU compiler refuses it for bfloat16.
    precision = None if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def _column(row: jax.Array) -> jax.Array:
    """Returns a row [1, size] as a column [size, 1]."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _toeplitz(window: jax.Array) -> jax.Array:
    """Returns the tile [size, size] with entry window[size + t - s] in row s and column t, of a window [1, 2 * size].

    Row s is the window rolled by s. The rows are doubled until there are `size` of them.
    """
    size = window.shape[1] // 2
    rolled = window
    while rolled.shape[0] < size:
        rolled = jnp.concatenate([rolled, pltpu.roll(rolled, rolled.shape[0], 1)], axis=0)
    return rolled[:, size:]


def _diagonal_sums(tile: jax.Array) -> jax.Array:
    """Returns the sums over the diagonals of a tile, float [1, 2 * size]: the transpose of `_toeplitz`.

    The lower half of the rows is rolled back and added to the upper one, until one row remains.
    """
    size = tile.shape[0]
    rolled = jnp.concatenate([jnp.zeros_like(tile), tile], axis=1)
    while rolled.shape[0] > 1:
        half = rolled.shape[0] // 2
        rolled = rolled[:half] + pltpu.roll(rolled[half:], 2 * size - half, 1)
    return rolled
