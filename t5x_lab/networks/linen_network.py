"""`LinenNetwork`: a network that is a Flax Linen module, called as T5X's models call theirs."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.bridge.variables import linen_vars_to_nnx_attrs

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.networks.module_network import ModuleNetwork
from t5x_lab.networks.network import Batch, Constrain

_ARCHITECTURES = ("encoder_decoder", "causal_decoder", "prefix_decoder")
_BY_NAME = (
    "encoder_segment_ids",
    "decoder_segment_ids",
    "encoder_positions",
    "decoder_positions",
    "decoder_causal_attention",
)


@dataclasses.dataclass(frozen=True)
class LinenNetwork:
    """A `Network` made of a Linen module with T5X's calling convention, which returns logits.

    An encoder-decoder's `__call__` has the arguments `encoder_input_tokens`, `decoder_input_tokens` and
    `decoder_target_tokens`, a decoder's the latter two. Those that it has of `encoder_segment_ids`, `decoder_segment_ids`,
    `encoder_positions`, `decoder_positions` and `decoder_causal_attention` are passed by name, and so are `enable_dropout` and
    `decode`. Parameters have the module's names. Their logical axes are declared with `param_with_axes` or
    `with_logical_partitioning`.

    To generate, an encoder-decoder has the methods `encode` and `decode`, and a decoder the arguments `prefill` and
    `prefill_lengths` of `__call__`. With `decode=True` they keep keys and values in the collection "cache".

    Attributes:
      module: the module, as in `LinenNetwork.module = @network.Transformer()`.
      architecture: "encoder_decoder", "causal_decoder" or "prefix_decoder".
      vocab_size: number of ids. None = `module.config.vocab_size`.
    """

    module: Any
    architecture: str = "encoder_decoder"
    vocab_size: int | None = None  # type: ignore[assignment]  # an int after __post_init__

    # A module may hold dictionaries, which are not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self):
        if not isinstance(self.module, linen.Module):
            raise UserError(
                f"LinenNetwork.module is {self.module!r}. It must be a module of flax.linen: LinenNetwork.module = @MyModule()."
            )
        check_types(self)
        check_choice("LinenNetwork.architecture", self.architecture, _ARCHITECTURES)
        size = self.vocab_size or getattr(getattr(self.module, "config", self.module), "vocab_size", None)
        if size is None:
            raise UserError("Set LinenNetwork.vocab_size, the number of ids that the module's logits have.")
        object.__setattr__(self, "vocab_size", size)

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "LinenModule":
        """Makes the module. See `Network.make`."""
        del constrain  # Linen modules shard activations with their own functions
        return (LinenDecoder if self._generates else LinenModule)(self, rngs)

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the FLOPs of one sequence. See `Network.flops`."""
        return self._counted.flops(encoder_length, decoder_length)

    @functools.cached_property
    def _counted(self) -> ModuleNetwork:
        return ModuleNetwork(lambda *, rngs: LinenModule(self, rngs))

    @property
    def _generates(self) -> bool:
        parameters = inspect.signature(self.module.__call__).parameters
        if self.architecture == "encoder_decoder":
            return "decode" in parameters and hasattr(self.module, "encode") and hasattr(self.module, "decode")
        return {"decode", "prefill", "prefill_lengths"} <= parameters.keys()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinenState:
    """Decoding state. Rows are the first axis of every array.

    Attributes:
      cache: the collection "cache" of a batch of one row, for each row.
      room: zeros [B, L], L the number of tokens that the cache can hold.
      prompt: encoder tokens [B, S], or None.
      encoded: encoder outputs [B, S, D], or None.
    """

    cache: Any
    room: jax.Array
    prompt: jax.Array | None = None
    encoded: jax.Array | None = None


class LinenModule(nnx.Module):
    """An NNX module with the parameters of a Linen module as attributes. See `LinenNetwork`."""

    def __init__(self, network: LinenNetwork, rngs: nnx.Rngs):
        self.network, self.architecture, self.vocab_size = network, network.architecture, network.vocab_size
        tokens = jnp.ones((1, 2), jnp.int32)
        keys = {"params": rngs.params(), "dropout": rngs.dropout()}
        inputs = [tokens] * (3 if self._has_encoder else 2)
        variables = network.module.init(keys, *inputs, **self._flags(network.module.__call__, False))
        for name, tree in linen_vars_to_nnx_attrs(variables).items():
            if hasattr(self, name):
                raise UserError(
                    f"{network.name} has parameters with the name {name}, which is taken. Rename the submodule or parameter."
                )
            setattr(self, name, _as_modules(tree))

    @property
    def _has_encoder(self) -> bool:
        return self.network.architecture == "encoder_decoder"

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns logits [B, T, V]. See `Module`."""
        module = self.network.module
        parameters = inspect.signature(module.__call__).parameters
        others = {name: batch[name] for name in _BY_NAME if name in batch and name in parameters}
        tokens = batch["decoder_input_tokens"]
        inputs = [tokens, batch.get("decoder_target_tokens", tokens)]  # targets mark padding
        if self._has_encoder:
            inputs.insert(0, batch["encoder_input_tokens"])
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        flags = self._flags(module.__call__, dropout_key is not None)
        return module.apply(self._variables(), *inputs, **others, **flags, rngs=rngs)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns its argument, since the module returns logits."""
        return hidden

    def _variables(self) -> dict[str, Any]:
        return {"params": nnx.to_pure_dict(nnx.state(self, nnx.Param))}

    def _flags(self, method: Any, enable_dropout: bool, **others: Any) -> dict[str, Any]:
        """Returns those of T5X's flags that a method has."""
        parameters = inspect.signature(method).parameters
        flags = {"enable_dropout": enable_dropout, "decode": False, **others}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return {name: value for name, value in flags.items() if takes_any or name in parameters}


class LinenDecoder(LinenModule):
    """A `LinenModule` that generates with the collection "cache" of its Linen module. See `Decoder`."""

    def prefill(self, prompt: jax.Array, max_tokens: int) -> tuple[jax.Array, LinenState]:
        """Reads prompts. See `Decoder.prefill`."""
        rows = prompt.shape[0]
        if self._has_encoder:
            encode = self.network.module.encode  # type: ignore[attr-defined]
            encoded = self.network.module.apply(self._variables(), prompt, **self._flags(encode, False), method=encode)
            room = jnp.zeros((rows, 1 + max_tokens), jnp.bool_)
            state = LinenState(self._empty_cache(room, prompt), room, prompt, encoded)
            first = jnp.zeros((rows, 1), jnp.int32)
        else:
            tokens = jnp.pad(prompt, ((0, 0), (1, max_tokens)))
            room = jnp.zeros(tokens.shape, jnp.bool_)
            lengths = 1 + jnp.sum(prompt > 0, axis=1)
            cache = self._read_prefix(self._empty_cache(room, None), tokens, lengths)
            state = LinenState(cache, room)
            first = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        logits, state = self.decode(state, first)
        return logits[:, 0], state

    def decode(self, state: LinenState, tokens: jax.Array, layers: Any = None) -> tuple[jax.Array, LinenState]:
        """Reads the next tokens. See `Decoder.decode`."""
        del layers
        variables, module, length = self._variables(), self.network.module, state.room.shape[1]
        method = module.decode if self._has_encoder else module.__call__  # type: ignore[attr-defined]
        flags = self._flags(method, False, decode=True, max_decode_length=length)

        def read(row: LinenState, token: jax.Array) -> tuple[jax.Array, LinenState]:
            token = token[None, None]
            encoder = [row.encoded[None], row.prompt[None]] if self._has_encoder else []  # type: ignore[index]
            logits, new = module.apply(
                {**variables, "cache": row.cache}, *encoder, token, token, **flags, mutable=["cache"], method=method
            )
            return logits[0, 0], dataclasses.replace(row, cache=new["cache"])

        logits = []
        for token in tokens.T:
            next_logits, state = jax.vmap(read)(state, token)
            logits.append(next_logits)
        return jnp.stack(logits, axis=1), state

    def _empty_cache(self, room: jax.Array, prompt: jax.Array | None) -> Any:
        """Returns the cache before the first token, for each row. Its size is that of the inputs, as in T5X."""
        module = self.network.module
        inputs = [jnp.ones((1, room.shape[1]), jnp.int32)] * 2
        if prompt is not None:
            inputs.insert(0, jnp.ones((1, prompt.shape[1]), jnp.int32))
        flags = self._flags(module.__call__, False, decode=True)
        _, variables = module.apply(self._variables(), *inputs, **flags, mutable=["cache"])
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (room.shape[0], *x.shape)), variables["cache"])

    def _read_prefix(self, cache: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        """Returns the cache after all tokens of the prompts but the last."""
        module, variables = self.network.module, self._variables()
        flags = self._flags(module.__call__, False, prefill=True)
        is_prefix = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
        has_prefix = (
            self.network.architecture == "prefix_decoder"
            and "decoder_causal_attention" in inspect.signature(module.__call__).parameters
        )

        def read(cache: Any, tokens: jax.Array, length: jax.Array, is_prefix: jax.Array) -> Any:
            prefix = {"decoder_causal_attention": is_prefix[None]} if has_prefix else {}
            inputs = [tokens[None], is_prefix[None]]  # the second marks padding
            options = {**flags, **prefix, "prefill_lengths": length[None] - 1}
            _, new = module.apply({**variables, "cache": cache}, *inputs, **options, mutable=["cache"])
            return new["cache"]

        return jax.vmap(read)(cache, tokens, lengths, is_prefix)


def _as_modules(tree: Any) -> Any:
    """Returns nested dictionaries of variables as `nnx.Dict`s."""
    return nnx.Dict({name: _as_modules(inner) for name, inner in tree.items()}) if isinstance(tree, dict) else tree
