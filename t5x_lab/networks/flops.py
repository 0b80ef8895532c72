"""Model FLOPs by hand: a multiply-add is two, the backward pass twice the forward, attention counted in full.

XLA's own count is wrong under scan and for kernels; 6 * parameters * tokens is wrong for encoder-decoders, where a token
crosses one of the two stacks. Recomputation (remat) is not in the model's FLOPs. S encoder length, T decoder length;
`c` is the network's configuration, which imports this file.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

BACKWARD = 2  # times the forward pass


def transformer_flops(c: Any, S: int, T: int) -> int:
    """Forward and backward FLOPs of one sequence; an architecture without one of the stacks has length 0 there."""
    return (1 + BACKWARD) * (sum(_transformer(c, S, T).values()) + _logits(c, T if c.has_decoder else S))


def transformer_recomputed_flops(c: Any, S: int, T: int, kept: tuple[str, ...] | None) -> int:
    """FLOPs of one sequence that the backward pass spends on what a remat policy does not keep (None: it keeps everything).

    Attention computes its scores once more by itself; in a layer under remat also scores and mixture, for its output.
    """
    products = _transformer(c, S, T)
    if kept is None:
        return products["scores"]
    missing = [name for name in ("heads", "sublayers", "mlp") if name not in kept]
    return 2 * products["scores"] + products["mixture"] + sum(products[name] for name in missing)


def lstm_flops(c: Any, T: int) -> int:
    """Forward and backward FLOPs of one sequence."""
    gates = 4 * c.hidden_dim * (c.emb_dim + c.hidden_dim)
    return (1 + BACKWARD) * (2 * T * (gates + c.hidden_dim * c.emb_dim) + _logits(c, T))


def _logits(c: Any, predicted: int) -> int:
    return 2 * predicted * c.emb_dim * c.vocab_size


def _transformer(c: Any, S: int, T: int) -> dict[str, int]:
    """Forward FLOPs of all layers' matrix products, under the names that remat policies have for their outputs.

    `mlp_output` has no such name: no backward pass needs what the MLP's last product puts out.
    """
    inner, kv_inner = c.num_heads * c.head_dim, c.kv_heads * c.head_dim
    E, D = c.num_encoder_layers, c.num_decoder_layers
    X = D if c.has_encoder else 0  # layers with cross-attention: queries over the decoder, keys and values over the encoder
    tokens = E * S + D * T
    return {
        "heads": 2 * c.emb_dim * (tokens * (inner + 2 * kv_inner) + X * (T * inner + 2 * S * kv_inner)),
        "scores": 2 * inner * (E * S * S + D * T * T + X * T * S),
        "mixture": 2 * inner * (E * S * S + D * T * T + X * T * S),
        "sublayers": 2 * c.emb_dim * inner * (tokens + X * T),
        "mlp": 2 * c.emb_dim * c.mlp_dim * tokens * len(c.mlp_activations),
        "mlp_output": 2 * c.emb_dim * c.mlp_dim * tokens,
    }


def traced_flops(function: Callable, *arguments: Any) -> int:
    """FLOPs of the matrix products and convolutions of a function, by its JAX program; nothing is computed.

    A scan counts as often as it runs; a while loop, whose trips are not known, once; of branches the costliest counts. What no
    result needs does not count.

    Args:
      function: of trees of arrays.
      arguments: their shapes.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return _of_jaxpr(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _of_jaxpr(jaxpr: Any) -> int:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    sizes = [getattr(variable.aval, "shape", ()) for variable in (*equation.invars, *equation.outvars)]
    if name == "dot_general":
        contracted = parameters["dimension_numbers"][0][0]
        return 2 * math.prod(sizes[-1]) * math.prod(sizes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        out_features = sizes[1][parameters["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(sizes[-1]) * math.prod(sizes[1]) // out_features
    inner = [_of_jaxpr(getattr(program, "jaxpr", program)) for program in jaxprs_in_params(parameters)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (parameters["length"] if name == "scan" else 1)
