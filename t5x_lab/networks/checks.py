"""Checks that a network satisfies the protocols, on shapes only, before anything is computed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.user_code import call_user_code, shown
from t5x_lab.networks.functional import Functional
from t5x_lab.networks.network import ARCHITECTURES, Network, abstract_batch, has_decoder, max_length, network_name

_ROWS, _TOKENS = 2, 3


class FeatureMismatch(UserError):
    """A network or a loss raises an error on a batch of SeqIO's token features. A converter may make the features it needs."""


def check_network(network: Network) -> Functional:
    """Checks a network and returns its module as a function of its parameters, without sharding.

    Raises:
      FeatureMismatch: if the module raises an error on token features.
      UserError: for a network that does not satisfy `Network` and `Module`.
    """
    try:
        hash(network)
    except TypeError:  # a field is a list or a dictionary
        return _check(network)
    else:
        return _check_cached(network)  # type: ignore[arg-type]


def _check(network: Network) -> Functional:
    name = network_name(network)
    make = lambda rngs: network.make(rngs, lambda x, axes: x)
    functional = call_user_code(f"The network {name} cannot be made", lambda: Functional(make))
    check_choice(f"{name}.architecture", network.architecture, ARCHITECTURES)
    if not isinstance(network.vocab_size, int) or network.vocab_size < 1:
        raise UserError(f"{name}.vocab_size is {network.vocab_size!r}. It must be the number of ids, an integer.")
    module = functional.abstract_module()
    for method in ("__call__", "logits"):
        if not callable(getattr(module, method, None)):
            raise UserError(f"{name} has no {method}. {_REQUIRED_METHODS}")

    def run(step: str, method: Callable, *args: Any) -> Any:
        call = lambda params, *args: method(functional.module(params), *args)
        return call_user_code(
            f"The network {name} fails {step}", lambda: jax.eval_shape(call, functional.abstract_params, *args)
        )

    limit = max_length(network) or _TOKENS + 1
    tokens = min(_TOKENS, limit)
    for packed in (True, False):
        batch = abstract_batch(network, _ROWS, tokens, tokens, packed)
        try:
            hidden = run(f"on a batch of {', '.join(batch)}", lambda module, batch: module(batch), batch)
        except UserError as error:
            if error.__cause__ is None:  # a mistake that has a message of its own
                raise
            raise FeatureMismatch(error.sentence) from error.__cause__
        _check_shape(f"{name} returns hidden states", hidden, (_ROWS, tokens))
    logits = run(f"in logits, for hidden states {hidden.shape}", lambda module, x: module.logits(x), hidden)
    _check_shape(f"{name}.logits returns logits", logits, (_ROWS, tokens, network.vocab_size), exact=True)
    flops = call_user_code(f"The network {name} cannot count its FLOPs", lambda: network.flops(tokens, tokens))
    if not isinstance(flops, int) or flops < 0:
        raise UserError(f"{name}.flops returns {flops!r}. It must return the FLOPs of one sequence, an integer.")
    if hasattr(module, "output_matrix"):
        _check_output_matrix(name, run, hidden, network.vocab_size)
    if hasattr(module, "prefill") != hasattr(module, "decode"):
        raise UserError(f"{name} has only one of prefill and decode. Generation needs both. Add the other, or remove it.")
    if has_decoder(network) and hasattr(module, "prefill") and limit > 1:
        _check_decoder(name, run, hidden, prompt_length=min(_TOKENS, limit - 1))
    return functional


def _check_output_matrix(name: str, run: Callable, hidden: jax.ShapeDtypeStruct, vocab_size: int) -> None:
    result = run("in output_matrix", lambda module: jax.tree.map(jnp.asarray, module.output_matrix()))
    shapes = [getattr(part, "shape", None) for part in result] if isinstance(result, tuple | list) else [result]
    if shapes != [(hidden.shape[-1], vocab_size), ()]:
        raise UserError(
            f"{name}.output_matrix returns shapes {shapes}. It must return a matrix of shape "
            f"{(hidden.shape[-1], vocab_size)} and a scalar scale."
        )


def _check_decoder(name: str, run: Callable, hidden: jax.ShapeDtypeStruct, prompt_length: int) -> None:
    prompt, token = (jax.ShapeDtypeStruct((_ROWS, length), jnp.int32) for length in (prompt_length, 1))
    last, state = run("in prefill", lambda module, x: module.prefill(x, 1), prompt)
    _check_shape(f"{name}.prefill returns hidden states", last, (_ROWS, *hidden.shape[2:]), exact=True)
    next_hidden, new_state = run("in decode", lambda module, state, x: module.decode(state, x), state, token)
    _check_shape(f"{name}.decode returns hidden states", next_hidden, (_ROWS, 1, *hidden.shape[2:]), exact=True)
    before, now = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, new_state))
    if before != now:
        raise UserError(f"{name}.decode changes the shapes of its state from {before} to {now}. They must not change.")


_REQUIRED_METHODS = "A network module needs __call__(batch), which returns hidden states, and logits(hidden)."
_check_cached = functools.lru_cache(maxsize=256)(_check)


def _check_shape(subject: str, result: Any, shape: tuple[int, ...], exact: bool = False) -> None:
    result_shape = getattr(result, "shape", None)
    expected = f"[{', '.join(map(str, shape))}{'' if exact else ', ...'}]"
    if result_shape is None or not jnp.issubdtype(result.dtype, jnp.floating):
        raise UserError(f"{subject} of type {shown(result)}. A float array {expected} is expected.")
    if (result_shape if exact else result_shape[: len(shape)]) != shape:
        raise UserError(f"{subject} of shape {list(result_shape)} for {_ROWS} rows. The shape {expected} is expected.")
