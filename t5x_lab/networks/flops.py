"""Analytic model FLOPs: a multiply-add counts two, the backward pass twice the forward pass.

Attention is counted in full, that of local layers over their windows. XLA's own count is wrong for scans and kernels;
6 * parameters * tokens is wrong for encoder-decoders, where a token passes through one of the two stacks. Recomputation (remat)
is not part of the model FLOPs. S encoder length, T decoder length; `c` is the network's configuration, which imports this file.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

BACKWARD = 2  # FLOPs of the backward pass relative to the forward pass


def transformer_flops(c: Any, S: int, T: int) -> int:
    """Returns the forward and backward FLOPs of one sequence. The length of a missing stack is 0."""
    return (1 + BACKWARD) * (sum(_transformer(c, S, T).values()) + _logits(c, T if c.has_decoder else S))


def transformer_recomputed_flops(c: Any, S: int, T: int, saved: tuple[str, ...] | None, in_kernels: bool = False) -> int:
    """Returns the FLOPs of one sequence that the backward pass recomputes.

    Attention always recomputes its scores. A layer under remat recomputes scores and mixture once more, for its output.

    Args:
      c: the configuration.
      S, T: encoder and decoder length.
      saved: names of the saved activations, see `REMAT_POLICIES`. None = all.
      in_kernels: attention is computed in fused kernels. One for the gradient of queries and one for that of keys and values
        both compute scores and the gradient of the weights. That for the gradient of T5's biases on GPUs, which computes them
        once more, is not counted.
    """
    products = _transformer(c, S, T)
    attention = products["scores"] + (products["scores"] + products["mixture"] if in_kernels else 0)
    if saved is None:
        return attention
    missing = [name for name in ("heads", "sublayers", "mlp") if name not in saved]
    return attention + products["scores"] + products["mixture"] + sum(products[name] for name in missing)


def lstm_flops(c: Any, T: int) -> int:
    """Returns the forward and backward FLOPs of one sequence."""
    gates = 4 * c.hidden_dim * (c.emb_dim + c.hidden_dim)
    return (1 + BACKWARD) * (2 * T * (gates + c.hidden_dim * c.emb_dim) + _logits(c, T))


def _logits(c: Any, predicted: int) -> int:
    return 2 * predicted * c.emb_dim * c.vocab_size


def _transformer(c: Any, S: int, T: int) -> dict[str, int]:
    """Returns the forward FLOPs of the matrix products in all layers, by the name of their output in remat policies.

    `mlp_output` is in no policy, because the backward pass does not need the output of the MLP's last product.
    """
    e = c.encoder_shape
    E, D = c.num_encoder_layers, c.num_decoder_layers
    X = D if c.has_encoder else 0  # layers with cross-attention: queries over the decoder, keys and values over the encoder
    Q = 0 if c.merged_attention else X  # layers with queries and outputs of cross-attention alone
    inner, kv_inner = c.num_heads * c.head_dim, c.kv_heads * c.head_dim
    encoder_inner, encoder_kv_inner = e.num_heads * e.head_dim, e.kv_heads * e.head_dim
    # Blocks of tokens that the encoder attends to.
    G = 0 if e.global_block_size is None else S // e.global_block_size
    encoder_pairs, decoder_pairs = _pairs(e, E, S, causal=False) + E * S * G, _pairs(c, D, T, causal=True) + X * T * S
    hidden = e.emb_dim * e.mlp_dim * E * S + c.emb_dim * c.mlp_dim * D * T
    return {
        "heads": 2 * e.emb_dim * (E * S * encoder_inner + E * (S + G) * 2 * encoder_kv_inner + X * S * 2 * kv_inner)
        + 2 * c.emb_dim * (D * T * (inner + 2 * kv_inner) + Q * T * inner),
        "scores": 2 * (encoder_inner * encoder_pairs + inner * decoder_pairs),
        "mixture": 2 * (encoder_inner * encoder_pairs + inner * decoder_pairs),
        "sublayers": 2 * (e.emb_dim * encoder_inner * E * S + c.emb_dim * inner * (D + Q) * T),
        "mlp": 2 * hidden * len(c.mlp_activations),
        "mlp_output": 2 * hidden,
    }


def _pairs(c: Any, layers: int, length: int, causal: bool) -> int:
    """Returns the number of queries times keys of self-attention in all layers of a stack."""
    pairs = 0
    for kind in c.kinds_of_layers(layers):
        window = c.kinds[kind].mask_window(causal)
        num_keys = length if window is None else min(length, window.before + 1 + (0 if causal else window.after))
        pairs += length * num_keys
    return pairs


def traced_flops(function: Callable, *arguments: Any) -> int:
    """Returns the FLOPs of the matrix products and convolutions in the jaxpr of a function, without running it.

    Scans count with their length, while loops once, conditionals with their most expensive branch. Unused results do not count.

    Args:
      function: function of trees of arrays.
      arguments: shapes of its arguments.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return _jaxpr_flops(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _jaxpr_flops(jaxpr: Any) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    sizes = [getattr(variable.aval, "shape", ()) for variable in (*equation.invars, *equation.outvars)]
    if name == "dot_general":
        contracted = parameters["dimension_numbers"][0][0]
        return 2 * math.prod(sizes[-1]) * math.prod(sizes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        out_features = sizes[1][parameters["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(sizes[-1]) * math.prod(sizes[1]) // out_features
    inner = [_jaxpr_flops(getattr(program, "jaxpr", program)) for program in jaxprs_in_params(parameters)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (parameters["length"] if name == "scan" else 1)
