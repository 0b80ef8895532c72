"""Kernels of attention for NVIDIA GPUs: the forward pass, and the gradients of queries, of keys and values, and of the bias.

A program has a tile of logits at a time, in registers, and the tiles of its queries or keys in a loop (Dao et al. 2022, here
with T5's biases, which it reads by their distances). The gradient of the bias has a kernel of its own: all tiles at the same
distance from the diagonal have the same bias, so that a program sums their gradients without others writing to them, and in
the same order every time.

Arrays by their names: "query" and "d_attended" [B, T, N, H], "key" and "value" [B, S, K, H], "query_codes" and "key_codes" int
[B, T] and [B, S], "bias" float [N, T + S], "log_sums" and "means" float [B, N, T]. T and S are multiples of the tile.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, H head size.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.kernels.tiling import Tiling

INTERPRET = False  # tests run the kernels without a GPU, slowly
SIZES = (64,)
WARPS, STAGES = 4, 2  # of a program, and of the pipeline that loads its tiles
_MASKED = -1e10
_PROGRAMS = 1024  # of the bias's gradient, at least: several for each of a large GPU's multiprocessors
Arrays = Mapping[str, jax.Array]
Refs = Mapping[str, Any]
Readers = Mapping[str, Callable[[Any], jax.Array]]  # functions of positions in the length, of arrays of one row and head

HEADS = 2  # the axis of heads in queries, keys and values
KEY_GRADIENTS = ("key", "value")  # the axes of their results
AXES: Mapping[str, tuple] = {
    **dict.fromkeys(("query", "d_attended"), ("batch", None, "heads", None)),
    **dict.fromkeys(("key", "value"), ("batch", None, "kv_heads", None)),
    **dict.fromkeys(("query_codes", "key_codes"), ("batch", None)),
    "bias": ("heads", None),
    "log_sums": ("batch", "heads", None),
    "means": ("batch", "heads", None),
    "d_bias": ("batch", "heads", None),
}


# ---- layout


def lay_out(x_BTNH: jax.Array, size: int) -> jax.Array:
    """Returns [B, T, N, H] with zeros to fill the last tile."""
    return jnp.pad(x_BTNH, ((0, 0), (0, -x_BTNH.shape[1] % size), (0, 0), (0, 0)))


def restore(x_BTNH: jax.Array, length: int) -> jax.Array:
    """Returns [B, T, N, H] up to a length."""
    return x_BTNH[:, :length]


def lay_out_rows(x_BTN: jax.Array, size: int) -> jax.Array:
    """Returns a number for each query and head as [B, N, T], with zeros to fill the last tile."""
    return jnp.swapaxes(jnp.pad(x_BTN, ((0, 0), (0, -x_BTN.shape[1] % size), (0, 0))), 1, 2)


def restore_rows(x_BNT: jax.Array, length: int) -> jax.Array:
    """Returns [B, N, T] as [B, T, N], up to a length."""
    return jnp.swapaxes(x_BNT, 1, 2)[:, :length]


def lay_out_codes(codes_BT: jax.Array, size: int) -> jax.Array:
    """Returns codes of tokens with 0, padding, to fill the last tile."""
    return jnp.pad(codes_BT, ((0, 0), (0, -codes_BT.shape[1] % size))).astype(jnp.int32)


def lay_out_bias(tiling: Tiling, bias: DiagonalBias) -> jax.Array:
    """Returns the bias by ascending distance of key - query, float [N, T + S]. The first value is that of distance -T."""
    D = bias.values.shape[1]
    T, S = tiling.query_tiles * tiling.size, tiling.key_tiles * tiling.size
    before = T - (bias.span - 1)  # the bias starts with distance -(span - 1)
    return jax.lax.pad(bias.values.astype(jnp.float32), jnp.float32(0), ((0, 0, 0), (before, T + S - before - D, 0)))


# ---- kernels


def attend(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the attended values [B, T, N, H], and the logarithms of the sums of exponentials [B, N, T]."""
    B, T, N, H = inputs["query"].shape
    size = tiling.size

    def kernel(refs: Refs, outputs: Sequence[Any]) -> None:
        i, read = pl.program_id(0), _readers(refs)
        query = _queries(read, i, size)

        def add_tile(j, carry):
            attended, largest, sums = carry
            logits, _ = _logits(tiling, read, query, _keys(read, j, size, in_columns=True))
            value = _part(read["value"], j, size)
            next_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
            weights, scale = jnp.exp(logits - next_largest[:, None]), jnp.exp(largest - next_largest)
            attended = attended * scale[:, None] + _product(weights.astype(value.dtype), value)
            return attended, next_largest, sums * scale + jnp.sum(weights, axis=1)

        start = jnp.zeros((size, H)), jnp.full((size,), -jnp.inf), jnp.zeros((size,))
        attended, largest, sums = _loop(tiling.keys_of(i), add_tile, start)
        outputs[0][pl.ds(i * size, size)] = (attended / sums[:, None]).astype(outputs[0].dtype)
        outputs[1][pl.ds(i * size, size)] = largest + jnp.log(sums)

    outputs = [("query", inputs["query"].shape, inputs["value"].dtype), ("log_sums", (B, N, T), jnp.float32)]
    return _call("attention", kernel, (tiling.query_tiles, N, B), inputs, outputs)


def gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    """Returns the gradients of queries, keys and values, and if there is a bias of its values, float [1, N, T + S]."""
    of_bias = [_bias_gradients(tiling, inputs)] if "bias" in inputs else []
    return [*_query_gradients(tiling, inputs), *_key_gradients(tiling, inputs), *of_bias]


def _query_gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    B, _, N, H = inputs["query"].shape
    size = tiling.size

    def kernel(refs: Refs, outputs: Sequence[Any]) -> None:
        i, read = pl.program_id(0), _readers(refs)
        query = _queries(read, i, size)
        of_query = _rows(read, i, size)

        def add_tile(j, total):
            key = _keys(read, j, size, in_columns=True)
            _, _, d_products = _tile_gradients(tiling, read, query, key, of_query, _part(read["value"], j, size))
            return total + _product(d_products.astype(key.x.dtype), key.x)

        total = _loop(tiling.keys_of(i), add_tile, jnp.zeros((size, H)))
        outputs[0][pl.ds(i * size, size)] = total.astype(outputs[0].dtype)

    outputs = [("query", inputs["query"].shape, inputs["query"].dtype)]
    return _call("attention_query_gradients", kernel, (tiling.query_tiles, N, B), inputs, outputs)


def _key_gradients(tiling: Tiling, inputs: Arrays) -> list[jax.Array]:
    B, _, K, H = inputs["key"].shape
    group, size = inputs["query"].shape[2] // K, tiling.size

    def kernel(refs: Refs, outputs: Sequence[Any]) -> None:
        j = pl.program_id(0)
        of_keys = _readers(refs)
        key, value = _keys(of_keys, j, size, in_columns=False), _part(of_keys["value"], j, size)

        def add_head(read, totals):
            def add_tile(i, totals):
                query = _queries(read, i, size, in_columns=True)
                of_query = _rows(read, i, size, in_columns=True)
                weights, _, d_products = _tile_gradients(tiling, read, query, key, of_query, value)
                d_key, d_value = totals
                d_value += _product(weights.astype(of_query.d_attended.dtype), of_query.d_attended)
                return d_key + _product(d_products.astype(query.x.dtype), query.x), d_value

            return _loop(tiling.queries_of(j), add_tile, totals)

        totals = jnp.zeros((size, H)), jnp.zeros((size, H))
        for head in range(group):
            totals = add_head(_readers(refs, head=head), totals)
        for output, total in zip(outputs, totals):
            output[pl.ds(j * size, size)] = total.astype(output.dtype)

    outputs = [(name, inputs[name].shape, inputs[name].dtype) for name in ("key", "value")]
    return _call("attention_key_gradients", kernel, (tiling.key_tiles, K, B), inputs, outputs, group)


def _bias_gradients(tiling: Tiling, inputs: Arrays) -> jax.Array:
    """Returns the gradient of the bias [1, N, T + S]."""
    B, _, N, _ = inputs["query"].shape
    size = tiling.size
    ranges = [tiling.keys_of(i) for i in range(tiling.query_tiles)]
    lowest = min(first - i for i, (first, _) in enumerate(ranges))
    highest = max(last - i for i, (_, last) in enumerate(ranges))
    count = highest - lowest + 1  # distances of tiles from the diagonal
    groups = next(n for n in range(1, B + 1) if B % n == 0 and (n == B or n * count * N >= _PROGRAMS))
    rows = B // groups

    def kernel(refs: Refs, outputs: Sequence[Any]) -> None:
        distance = pl.program_id(0) + lowest
        first = jnp.maximum(0, -distance)
        tiles = jnp.minimum(tiling.query_tiles, tiling.key_tiles - distance) - first

        def add_tile(step, total):
            row, i = jax.lax.div(step, tiles), first + jax.lax.rem(step, tiles)
            read = _readers(refs, row=row)
            query, key = _queries(read, i, size), _keys(read, i + distance, size, in_columns=True)
            value = _part(read["value"], i + distance, size)
            return total + _tile_gradients(tiling, read, query, key, _rows(read, i, size), value)[1]

        outputs[0][...] = jax.lax.fori_loop(0, rows * tiles, add_tile, jnp.zeros((size, size)))

    outputs = [("tiles", (groups, N, count, size, size), jnp.float32)]
    (tiles,) = _call("attention_bias_gradients", kernel, (count, N, groups), inputs, outputs, rows=rows)
    before, after = lowest + tiling.query_tiles, tiling.key_tiles - 1 - highest
    all_tiles = jnp.pad(jnp.sum(tiles, axis=0), ((0, 0), (before, after), (0, 0), (0, 0)))
    zeros = jnp.zeros_like(inputs["bias"])
    (d_bias,) = jax.vjp(functools.partial(_bias_tiles, size=size), zeros)[1](all_tiles)
    return d_bias[None]


def _bias_tiles(bias: jax.Array, size: int) -> jax.Array:
    """Returns the tiles of the bias by their distance from the diagonal, [N, tiles, size, size], from its values [N, T + S].

    Tile r has the entry bias[size * r + k - q] for query q and key k. Values before the first are 0.
    """
    N = bias.shape[0]
    parts = jnp.pad(bias, ((0, 0), (size, 0))).reshape(N, -1, size)
    windows = jnp.concatenate([parts[:, :-1], parts[:, 1:]], axis=2)  # the tile's values from distance -size on
    R = windows.shape[1]
    # A copy of the window for each query, of which rows that are one longer skip one value more in each row.
    copies = jnp.broadcast_to(windows[:, :, None], (N, R, size, 2 * size)).reshape(N, R, -1)
    rows = jnp.pad(copies, ((0, 0), (0, 0), (0, size))).reshape(N, R, size, 2 * size + 1)
    return rows[:, :, ::-1, 1 : size + 1]


def _call(
    name: str,
    kernel: Callable,
    grid: tuple[int, int, int],
    inputs: Arrays,
    outputs: Sequence[tuple[str, tuple[int, ...], Any]],
    group: int = 0,
    rows: int = 0,
) -> list[jax.Array]:
    """Calls a kernel with references to the arrays of one row and one head. The grid is tiles, heads and rows.

    Args:
      name: name in profiles.
      kernel: function of references to inputs, by name, and to outputs.
      grid: number of programs along each axis.
      inputs: see the module.
      outputs: kind, shape and dtype of each output.
      group: the heads are those of keys; arrays of queries have this many heads for each. 0: the heads are those of queries.
      rows: number of rows of a program, as the first axis of its arrays. 0: one, without this axis.
    """
    shapes = {kind: shape for kind, shape, _ in outputs} | {name: x.shape for name, x in inputs.items()}
    per_key = 1 if group else inputs["query"].shape[2] // inputs["key"].shape[2]
    row, heads = rows or None, group or None
    key_head = lambda n: jax.lax.div(n, per_key)

    def spec(kind: str) -> pl.BlockSpec:
        shape = shapes[kind]
        if kind in ("query", "d_attended"):
            return pl.BlockSpec((row, shape[1], heads, shape[3]), lambda tile, n, b: (b, 0, n, 0))
        if kind in ("key", "value"):
            return pl.BlockSpec((row, shape[1], None, shape[3]), lambda tile, n, b: (b, 0, key_head(n), 0))
        if kind in ("query_codes", "key_codes"):
            return pl.BlockSpec((row, shape[1]), lambda tile, n, b: (b, 0))
        if kind == "bias":
            return pl.BlockSpec((heads, shape[1]), lambda tile, n, b: (n, 0))
        if kind == "tiles":
            return pl.BlockSpec((None, None, None, *shape[3:]), lambda tile, n, b: (b, n, tile, 0, 0))
        return pl.BlockSpec((row, heads, shape[2]), lambda tile, n, b: (b, n, 0))  # log_sums, means

    def with_names(*refs):
        kernel(dict(zip(inputs, refs)), refs[len(inputs) :])

    return pl.pallas_call(
        with_names,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
        grid=grid,
        in_specs=[spec(name) for name in inputs],
        out_specs=[spec(kind) for kind, _, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=INTERPRET,
        name=name,
    )(*inputs.values())


def _loop(tiles: tuple[Any, Any], body: Callable, start: Any) -> Any:
    return jax.lax.fori_loop(tiles[0], tiles[1] + 1, body, start)


def _readers(refs: Refs, row: Any = None, head: int | None = None) -> Readers:
    """Returns readers of references.

    Args:
      refs: references by name.
      row: the row, if the first axis of arrays is that of rows.
      head: the head, if arrays of queries have an axis of heads.
    """

    def reader(name: str, ref: Any) -> Callable[[Any], jax.Array]:
        rows = () if row is None or name == "bias" else (row,)
        heads = () if head is None or name in ("key", "value", "query_codes", "key_codes") else (head,)
        if name in ("query", "d_attended"):
            return lambda positions: ref[(*rows, positions, *heads)]
        return lambda positions: ref[(*rows, *heads, positions)]

    return {name: reader(name, ref) for name, ref in refs.items()}


# ---- one tile


class _Tokens(NamedTuple):
    """A tile of queries or keys [size, H], with positions and codes in rows [size, 1] or columns [1, size] of the logits."""

    x: jax.Array
    positions: jax.Array
    codes: Any  # None without segments and prefixes


class _Rows(NamedTuple):
    """The gradient of a tile's attended values [size, H], and numbers of its queries, in rows or columns of the logits."""

    d_attended: jax.Array
    log_sums: jax.Array
    means: jax.Array


def _queries(read: Readers, i: Any, size: int, in_columns: bool = False) -> _Tokens:
    return _tokens(read, "query", i, size, in_columns)


def _keys(read: Readers, j: Any, size: int, in_columns: bool) -> _Tokens:
    return _tokens(read, "key", j, size, in_columns)


def _tokens(read: Readers, name: str, tile: Any, size: int, in_columns: bool) -> _Tokens:
    codes = f"{name}_codes"
    expand = lambda x: jnp.expand_dims(x, 0 if in_columns else 1)
    positions = tile * size + jnp.arange(size)
    return _Tokens(
        _part(read[name], tile, size),
        expand(positions),
        expand(_part(read[codes], tile, size)) if codes in read else None,
    )


def _rows(read: Readers, i: Any, size: int, in_columns: bool = False) -> _Rows:
    expand = lambda name: jnp.expand_dims(_part(read[name], i, size), 0 if in_columns else 1)
    return _Rows(_part(read["d_attended"], i, size), expand("log_sums"), expand("means"))


def _part(read: Callable[[Any], jax.Array], tile: Any, size: int) -> jax.Array:
    return read(pl.ds(tile * size, size))


def _logits(tiling: Tiling, read: Readers, query: _Tokens, key: _Tokens) -> tuple[jax.Array, jax.Array | None]:
    """Returns the masked logits of a tile, and tanh(x / cap) if there is a cap, float [queries, keys] or [keys, queries]."""
    logits, tanh = _product_of_tokens(query.x, key.x, query.positions.shape[0] > 1), None
    if tiling.logit_cap is not None:
        tanh = jnp.tanh(logits / tiling.logit_cap)
        logits = tanh * tiling.logit_cap
    if "bias" in read:
        logits += read["bias"](key.positions - query.positions + tiling.query_tiles * tiling.size)
    allowed = tiling.allowed(key.positions, query.positions, key.codes, query.codes)
    logits = logits if allowed is None else jnp.where(allowed, logits, _MASKED)
    return logits, tanh


def _tile_gradients(
    tiling: Tiling, read: Readers, query: _Tokens, key: _Tokens, of_query: _Rows, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the weights, and the gradients of logits and of products of queries and keys, of the logits' shape."""
    logits, tanh = _logits(tiling, read, query, key)
    weights = jnp.exp(logits - of_query.log_sums)
    d_weights = _product_of_tokens(of_query.d_attended, value, query.positions.shape[0] > 1)
    d_logits = weights * (d_weights - of_query.means)
    return weights, d_logits, d_logits if tanh is None else d_logits * (1.0 - tanh * tanh)


def _product_of_tokens(x: jax.Array, y: jax.Array, x_in_rows: bool) -> jax.Array:
    """Returns the inner products of two tiles [size, H], with those of x in rows or columns."""
    return _product(x, y.T) if x_in_rows else _product(y, x.T)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the product of two matrices in float32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
