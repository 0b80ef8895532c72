"""Kernels of attention for TPUs: the forward pass, and the gradients of the queries and the bias, and of the keys and values.

A tile has the logits of keys (rows) and queries (columns). It exists in the chip's vector memory only, and so does its part of
the bias, which is built from a window of the diagonals (Dao et al. 2022, here with T5's biases). The kernels read arrays by
their names: "query", "key" and "value" [B, heads, H, length], rows "query_codes", "key_codes" and "bias" if any (see `tiles`),
and in the backward pass "d_attended", "log_sums" and "means".

Axis letters: B batch, N heads, K heads of keys and values, H head size.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from t5x_lab.ops.tiles import UNLIMITED, Tiling

INTERPRET = False  # tests run the kernels without a TPU, slowly
_MASKED = -1e10
_LANES = 128
Arrays = Mapping[str, jax.Array]


def attend(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the attended values [B, N, H, length], and the logarithms of the sums of exponentials [B, N, tiles, 1, size]."""
    B, N, H, _ = inputs["query"].shape
    last = tiling.most_keys() - 1

    def kernel(inputs, outputs, scratch):
        i, step = pl.program_id(2), pl.program_id(3)
        first_key, last_key = tiling.keys_of(i)
        largest_ref, sums_ref, attended_ref = scratch

        @pl.when(step == 0)
        def start():
            largest_ref[...] = jnp.full_like(largest_ref, -jnp.inf)
            sums_ref[...] = jnp.zeros_like(sums_ref)
            attended_ref[...] = jnp.zeros_like(attended_ref)

        @pl.when(first_key + step <= last_key)
        def add_tile():
            logits, _ = _logits(tiling, inputs, i, first_key + step)
            largest = jnp.maximum(largest_ref[...], jnp.max(logits, axis=0, keepdims=True))
            weights, scale = jnp.exp(logits - largest), jnp.exp(largest_ref[...] - largest)
            value = inputs["value"][0, 0]
            largest_ref[...] = largest
            sums_ref[...] = sums_ref[...] * scale + jnp.sum(weights, axis=0, keepdims=True)
            attended_ref[...] = attended_ref[...] * scale + _contract(value, weights.astype(value.dtype), 1, 0)

        @pl.when(step == last)
        def finish():
            outputs[0][0, 0] = (attended_ref[...] / sums_ref[...]).astype(outputs[0].dtype)
            outputs[1][0, 0, 0] = largest_ref[...] + jnp.log(sums_ref[...])

    query, sums = inputs["query"].shape, (B, N, tiling.query_tiles, 1, tiling.size)
    return _call(
        "attention", tiling, kernel, (B, N, tiling.query_tiles, last + 1), functools.partial(_query_place, tiling),
        inputs, [("query", query, inputs["value"].dtype), ("log_sums", sums, jnp.float32)],
        [(1, tiling.size), (1, tiling.size), (H, tiling.size)],
    )  # fmt: skip


def query_gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the gradient of the queries, and if there is a bias that of its rows, float [B, N, tiles, size]."""
    B, N, H, _ = inputs["query"].shape
    last = tiling.most_keys() - 1

    def kernel(inputs, outputs, scratch):
        i, step = pl.program_id(2), pl.program_id(3)
        first_key, last_key = tiling.keys_of(i)
        (d_query_ref, *d_bias_refs), (total_ref,) = outputs, scratch

        @pl.when(step == 0)
        def start():
            total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when((step == 0) & (i == 0))
        def start_bias():
            for ref in d_bias_refs:
                ref[...] = jnp.zeros_like(ref)

        @pl.when(first_key + step <= last_key)
        def add_tile():
            j = first_key + step
            _, d_logits, d_products = _tile_gradients(tiling, inputs, i, j)
            key = inputs["key"][0, 0]
            total_ref[...] += _contract(key, d_products.astype(key.dtype), 1, 0)
            for ref in d_bias_refs:
                sums, row = _diagonal_sums(d_logits), tiling.bias_row(i, j)
                ref[0, 0, pl.ds(row, 1)] += sums[:, : tiling.size]
                ref[0, 0, pl.ds(row + 1, 1)] += sums[:, tiling.size :]

        @pl.when(step == last)
        def finish():
            d_query_ref[0, 0] = total_ref[...].astype(d_query_ref.dtype)

    outputs = [("query", inputs["query"].shape, inputs["query"].dtype)]
    if "bias" in inputs:
        outputs.append(("d_bias", (B, N, tiling.query_tiles + tiling.key_tiles, tiling.size), jnp.float32))
    return _call(
        "attention_query_gradients", tiling, kernel, (B, N, tiling.query_tiles, last + 1),
        functools.partial(_query_place, tiling), inputs, outputs, [(H, tiling.size)],
    )  # fmt: skip


def key_gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the parts of the gradients of the keys and values that each query head adds, [B, N, H, length]."""
    B, N, H, _ = inputs["query"].shape
    last = tiling.most_queries() - 1

    def place(b, n, j, step):
        first, last = tiling.queries_of(j)
        return b, n, jnp.minimum(first + step, last), j

    def kernel(inputs, outputs, scratch):
        j, step = pl.program_id(2), pl.program_id(3)
        first_query, last_query = tiling.queries_of(j)

        @pl.when(step == 0)
        def start():
            for ref in scratch:
                ref[...] = jnp.zeros_like(ref)

        @pl.when(first_query + step <= last_query)
        def add_tile():
            weights, _, d_products = _tile_gradients(tiling, inputs, first_query + step, j)
            query, d_attended = inputs["query"][0, 0], inputs["d_attended"][0, 0]
            scratch[0][...] += _contract(query, d_products.astype(query.dtype), 1, 1)
            scratch[1][...] += _contract(d_attended, weights.astype(d_attended.dtype), 1, 1)

        @pl.when(step == last)
        def finish():
            for output, total in zip(outputs, scratch):
                output[0, 0] = total[...].astype(output.dtype)

    shape = (B, N, *inputs["key"].shape[2:])
    is_sum = inputs["key"].shape[1] < N  # of several heads, in float32
    outputs = [("d_key", shape, jnp.float32 if is_sum else inputs[name].dtype) for name in ("key", "value")]
    return _call(
        "attention_key_gradients", tiling, kernel, (B, N, tiling.key_tiles, last + 1), place, inputs, outputs,
        [(H, tiling.size)] * 2,
    )  # fmt: skip


def _query_place(tiling: Tiling, b, n, i, step):
    """Returns row, head, tile of queries and tile of keys of an index (row, head, tile of queries, step) of the grid."""
    first, last = tiling.keys_of(i)
    return b, n, i, jnp.minimum(first + step, last)


def _call(
    name: str,
    tiling: Tiling,
    kernel: Callable,
    grid: tuple[int, ...],
    place: Callable,
    inputs: Arrays,
    outputs: Sequence[tuple[str, tuple[int, ...], Any]],
    scratch: Sequence[tuple[int, int]],
) -> list[jax.Array]:
    """Calls a kernel with references to tiles of the inputs, by name, to tiles of the outputs, and to scratch memory.

    Args:
      name: name in profiles.
      tiling: sizes of the tiles.
      kernel: the kernel.
      grid: sizes of the grid. The first two axes are independent.
      place: function from indices of the grid to row, head, tile of queries and tile of keys.
      inputs: see the module.
      outputs: kind, shape and dtype of each output.
      scratch: shapes of scratch memory, float32.
    """
    H, group = inputs["query"].shape[2], inputs["query"].shape[1] // inputs["key"].shape[1]
    size, bias_tiles = tiling.size, tiling.query_tiles + tiling.key_tiles

    def spec(shape: tuple[int, ...], index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *ids: index(*place(*ids)))

    of_query = spec((1, 1, H, size), lambda b, n, i, j: (b, n, 0, i))
    of_key = spec((1, 1, H, size), lambda b, n, i, j: (b, jax.lax.div(n, group), 0, j))
    of_sums = spec((1, 1, 1, 1, size), lambda b, n, i, j: (b, n, i, 0, 0))
    bias_row = lambda shift: spec((1, 1, 1, size), lambda b, n, i, j: (n, tiling.bias_row(i, j) + shift, 0, 0))
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
    semantics: Any = ("parallel",) * 2 + ("arbitrary",) * (len(grid) - 2)

    def with_names(*refs):
        kernel(dict(zip(names, refs)), refs[len(names) : len(names) + count], refs[len(names) + count :])

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


# ---- one tile


def _logits(tiling: Tiling, inputs: Mapping[str, Any], i, j) -> tuple[jax.Array, jax.Array | None]:
    """Returns the masked logits of a tile, float [keys, queries], and tanh(x / cap) if there is a cap."""
    logits, tanh = _contract(inputs["key"][0, 0], inputs["query"][0, 0], 0, 0), None
    if tiling.logit_cap is not None:
        tanh = jnp.tanh(logits / tiling.logit_cap)
        logits = tanh * tiling.logit_cap
    if "bias" in inputs:
        logits += _toeplitz(jnp.concatenate([inputs["bias"][0, 0], inputs["next_bias"][0, 0]], axis=1))
    keys = j * tiling.size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    queries = i * tiling.size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    key_codes: Any = _column(inputs["key_codes"][0, 0]).astype(jnp.int32) if "key_codes" in inputs else None
    query_codes: Any = inputs["query_codes"][0, 0].astype(jnp.int32) if "query_codes" in inputs else None
    rules = []
    if tiling.is_causal:
        is_left = keys <= queries
        rules.append(is_left | ((query_codes & key_codes & 1) == 1) if tiling.has_prefix else is_left)
    if tiling.before < UNLIMITED:
        rules.append(keys >= queries - tiling.before)
    if tiling.after < UNLIMITED and (tiling.has_prefix or not tiling.is_causal):
        rules.append(keys <= queries + tiling.after)
    if key_codes is not None:
        rules.append(key_codes >= 2)
        if tiling.has_query_segments:
            rules.append((query_codes >> 1) == (key_codes >> 1))
    elif tiling.S % tiling.size:
        rules.append(keys < tiling.S)
    if rules:
        logits = jnp.where(functools.reduce(jnp.logical_and, rules), logits, _MASKED)
    return logits, tanh


def _tile_gradients(tiling: Tiling, inputs: Mapping[str, Any], i, j) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the weights, and the gradients of logits and of products of queries and keys, float [keys, queries]."""
    logits, tanh = _logits(tiling, inputs, i, j)
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
