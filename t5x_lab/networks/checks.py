"""What a network must be, found out on shapes alone, before anything is computed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError, one_of
from t5x_lab.config.user_code import shown, tried
from t5x_lab.networks.functional import Functional
from t5x_lab.networks.network import ARCHITECTURES, Network, abstract_batch, has_decoder, max_length, name_of

_ROWS, _TOKENS = 2, 3


def check_network(network: Network) -> Functional:
    """The network's module as a function of its parameters, not split over a mesh.

    Raises:
      UserError: for a network that does not do what `Network` and `Module` say.
    """
    try:
        hash(network)
    except TypeError:  # of a field that is a list, or a dictionary
        return _check(network)
    else:
        return _check_once(network)  # type: ignore[arg-type]


def _check(network: Network) -> Functional:
    name = name_of(network)
    make = lambda rngs: network.make(rngs, lambda x, axes: x)
    functional = tried(f"The network {name} cannot be made", lambda: Functional(make))
    one_of(f"{name}.architecture", network.architecture, ARCHITECTURES)
    if not isinstance(network.vocab_size, int) or network.vocab_size < 1:
        raise UserError(f"{name}.vocab_size is {network.vocab_size!r}; it must be the number of ids, a whole number.")
    module = functional.abstract_module()
    for method in ("__call__", "logits"):
        if not callable(getattr(module, method, None)):
            raise UserError(f"{name} has no {method}. {_METHODS}")

    def run(what: str, method: Callable, *args: Any) -> Any:
        of_params = lambda params, *args: method(functional.module(params), *args)
        return tried(f"The network {name} fails {what}", lambda: jax.eval_shape(of_params, functional.abstract_params, *args))

    most = max_length(network) or _TOKENS + 1
    tokens = min(_TOKENS, most)
    for packed in (True, False):
        batch = abstract_batch(network, _ROWS, tokens, tokens, packed)
        hidden = run(f"on a batch of {', '.join(batch)}", lambda module, batch: module(batch), batch)
        _expect(f"{name} gives hidden states", hidden, (_ROWS, tokens))
    logits = run(f"to make logits of hidden states {hidden.shape}", lambda module, x: module.logits(x), hidden)
    _expect(f"{name}.logits gives logits", logits, (_ROWS, tokens, network.vocab_size), whole=True)
    flops = tried(f"The network {name} cannot count its FLOPs", lambda: network.flops(tokens, tokens))
    if not isinstance(flops, int) or flops < 0:
        raise UserError(f"{name}.flops gives {flops!r}; it must give a whole number, the FLOPs of one sequence.")
    if hasattr(module, "output_matrix"):
        _check_output_matrix(name, run, hidden, network.vocab_size)
    if hasattr(module, "prefill") != hasattr(module, "decode"):
        raise UserError(f"{name} has one of prefill and decode; a network that generates has both. Add the other, or neither.")
    if has_decoder(network) and hasattr(module, "prefill") and most > 1:
        _check_decoder(name, run, hidden, prompt_length=min(_TOKENS, most - 1))
    return functional


def _check_output_matrix(name: str, run: Callable, hidden: jax.ShapeDtypeStruct, vocab_size: int) -> None:
    found = run("in output_matrix", lambda module: jax.tree.map(jnp.asarray, module.output_matrix()))
    shapes = [getattr(part, "shape", None) for part in found] if isinstance(found, tuple | list) else [found]
    if shapes != [(hidden.shape[-1], vocab_size), ()]:
        raise UserError(
            f"{name}.output_matrix gives {shapes}; a matrix of the shape {(hidden.shape[-1], vocab_size)} and a number are "
            "expected, which make the same logits as the method logits."
        )


def _check_decoder(name: str, run: Callable, hidden: jax.ShapeDtypeStruct, prompt_length: int) -> None:
    prompt, token = (jax.ShapeDtypeStruct((_ROWS, length), jnp.int32) for length in (prompt_length, 1))
    last, state = run("to read a prompt", lambda module, x: module.prefill(x, 1), prompt)
    _expect(f"{name}.prefill gives the hidden states", last, (_ROWS, *hidden.shape[2:]), whole=True)
    after, new = run("to decode a token", lambda module, state, x: module.decode(state, x), state, token)
    _expect(f"{name}.decode gives hidden states", after, (_ROWS, 1, *hidden.shape[2:]), whole=True)
    before, now = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, new))
    if before != now:
        raise UserError(f"{name}.decode changes the shapes of its state, from {before} to {now}; they must stay.")


_METHODS = "A network is called with a batch, and gives hidden states; its method logits makes logits of them."
_check_once = functools.lru_cache(maxsize=256)(_check)


def _expect(what: str, found: Any, shape: tuple[int, ...], whole: bool = False) -> None:
    given = getattr(found, "shape", None)
    wanted = f"[{', '.join(map(str, shape))}{'' if whole else ', …'}]"
    if given is None or not jnp.issubdtype(found.dtype, jnp.floating):
        raise UserError(f"{what} that are {shown(found)}; an array of floats {wanted} is expected.")
    if (given if whole else given[: len(shape)]) != shape:
        raise UserError(f"{what} of the shape {list(given)} for {_ROWS} rows; the shape {wanted} is expected.")
