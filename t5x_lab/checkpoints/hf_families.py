"""How Hugging Face's T5, mT5, GPT-1 and Llama name and lay out their tensors, and say what they are.

A family is a table: each of its tensors is one of ours, or several side by side, laid out in a known way. The same table reads
and writes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.tensors import Tensor, check_shape, joined
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import NetworkConfig, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of their tensors.

    Attributes:
      name: theirs.
      ours: names of ours, side by side along the last dimension as we store it.
      inputs: the first so many dimensions of ours are a matrix's inputs, the others its outputs.
      transposed: whether theirs has outputs first, as PyTorch's `Linear` does.
    """

    name: str
    ours: tuple[str, ...]
    inputs: int = 1
    transposed: bool = False

    def theirs(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Their tensor, made of ours."""
        parts = []
        for name in self.ours:
            shape = tensors[name].shape
            flat = (
                [math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])]
                if self._is_matrix(shape)
                else [math.prod(shape)]
            )
            parts.append(tensors[name].reshaped(flat))
        whole = parts[0] if len(parts) == 1 else joined(parts, axis=len(parts[0].shape) - 1)
        return whole.transposed() if self.transposed else whole

    def split(self, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Tensor]:
        """Our tensors, of theirs."""
        whole = tensor.transposed() if self.transposed else tensor
        columns = [
            math.prod(shapes[name][self.inputs :] if self._is_matrix(shapes[name]) else shapes[name]) for name in self.ours
        ]
        first = shapes[self.ours[0]]
        rows = [math.prod(first[: self.inputs])] if self._is_matrix(first) else []
        check_shape(self.name, whole.shape, (*rows, sum(columns)), where)
        found, start = {}, 0
        for name, width in zip(self.ours, columns, strict=True):
            part = whole if len(self.ours) == 1 else whole.cut(len(rows), start, start + width)
            found[name] = part.reshaped(shapes[name])
            start += width
        return found

    def _is_matrix(self, shape: tuple[int, ...]) -> bool:
        return self.inputs > 0 and len(shape) > 1


def linear(name: str, ours: str, inputs: int = 1) -> Entry:
    """A matrix stored with outputs first."""
    return Entry(f"{name}.weight", (f"{ours}/kernel",), inputs, transposed=True)


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that `transformers` has one class for.

    Attributes:
      entries: their tensors, of one of our configurations.
      to_theirs: config.json, of one of our configurations; None where it is not of this family.
      to_ours: our configuration, of a config.json.
      aliases: names of theirs -> the same tensor's other name, both of which may be in a file.
    """

    entries: Callable[[Any], Iterator[Entry]]
    to_theirs: Callable[[TransformerConfig], dict[str, Any] | None]
    to_ours: Callable[[Mapping[str, Any]], TransformerConfig]
    aliases: Callable[[str], str]


# ---- T5


def _t5_entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("shared.weight", ("token_embedder/embedding",))
    stacks = (
        ("encoder", c.num_encoder_layers, ("SelfAttention",)),
        ("decoder", c.num_decoder_layers, ("SelfAttention", "EncDecAttention")),
    )
    for stack, num_layers, attentions in stacks:
        bias = ".layer.0.SelfAttention.relative_attention_bias.weight"
        yield Entry(f"{stack}.block.0{bias}", (f"{stack}/relpos_bias/rel_embedding",), transposed=True)
        for i in range(num_layers):
            theirs, ours = f"{stack}.block.{i}", f"{stack}/layers_{i}"
            for number, name in enumerate(attentions):
                of, norm = {
                    "SelfAttention": ("self_attention", "pre_self_attention_layer_norm"),
                    "EncDecAttention": ("encoder_decoder_attention", "pre_cross_attention_layer_norm"),
                }[name]
                yield Entry(f"{theirs}.layer.{number}.layer_norm.weight", (f"{ours}/{norm}/scale",))
                for letter, which in (("q", "query"), ("k", "key"), ("v", "value")):
                    yield linear(f"{theirs}.layer.{number}.{name}.{letter}", f"{ours}/{of}/{which}")
                yield linear(f"{theirs}.layer.{number}.{name}.o", f"{ours}/{of}/out", inputs=2)
            number = len(attentions)
            yield Entry(f"{theirs}.layer.{number}.layer_norm.weight", (f"{ours}/pre_mlp_layer_norm/scale",))
            for name in ("wi",) if len(c.mlp_activations) == 1 else ("wi_0", "wi_1"):
                yield linear(f"{theirs}.layer.{number}.DenseReluDense.{name}", f"{ours}/mlp/{name}")
            yield linear(f"{theirs}.layer.{number}.DenseReluDense.wo", f"{ours}/mlp/wo")
        yield Entry(f"{stack}.final_layer_norm.weight", (f"{stack}/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _t5_to_theirs(c: TransformerConfig) -> dict[str, Any] | None:
    activation = _t5_activation(c.mlp_activations)
    is_t5 = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling) == ("encoder_decoder", "relative", "rms", "pre", "t5")
        and activation
        and c.kv_heads == c.num_heads
        and c.relative_bias == "shared"
        and not (c.use_bias or c.share_stacks)
    )
    if not is_t5:
        return None
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": c.vocab_size,
        "d_model": c.emb_dim,
        "d_kv": c.head_dim,
        "d_ff": c.mlp_dim,
        "num_layers": c.num_encoder_layers,
        "num_decoder_layers": c.num_decoder_layers,
        "num_heads": c.num_heads,
        "feed_forward_proj": activation,
        "relative_attention_num_buckets": c.relpos_buckets,
        "relative_attention_max_distance": c.relpos_max_distance,
        "layer_norm_epsilon": c.norm_epsilon,
        "tie_word_embeddings": c.logits_via_embedding,  # what transformers takes for "tied logits, and scaled"
        "dropout_rate": c.dropout_rate,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


_GATED = {"gated-gelu": "gelu", "gated-silu": "silu", "gated-relu": "relu"}
_PLAIN = {"relu": "relu", "silu": "silu", "tanh": "tanh", "gelu_new": "gelu"}


def _t5_activation(activations: tuple[str, ...]) -> str | None:
    if len(activations) == 2 and activations[1] == "linear":
        return next((theirs for theirs, ours in _GATED.items() if ours == activations[0]), None)
    return next((theirs for theirs, ours in _PLAIN.items() if (ours,) == activations), None)


def _t5_to_ours(config: Mapping[str, Any]) -> TransformerConfig:
    activation = config.get("feed_forward_proj", "relu")
    if activation not in _GATED and activation not in _PLAIN:
        raise UserError(f'config.json has feed_forward_proj "{activation}", which t5x_lab has no activation for.')
    return TransformerConfig(
        architecture="encoder_decoder",
        vocab_size=config["vocab_size"],
        emb_dim=config["d_model"],
        num_heads=config["num_heads"],
        head_dim=config["d_kv"],
        mlp_dim=config["d_ff"],
        num_encoder_layers=config["num_layers"],
        num_decoder_layers=config.get("num_decoder_layers") or config["num_layers"],
        mlp_activations=(_GATED[activation], "linear") if activation in _GATED else (_PLAIN[activation],),
        logits_via_embedding=_t5_is_tied(config),
        relpos_buckets=config.get("relative_attention_num_buckets", 32),
        relpos_max_distance=config.get("relative_attention_max_distance", 128),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
    )


def _t5_is_tied(config: Mapping[str, Any]) -> bool:
    """transformers 5 calls every T5 tied, and tells T5 1.0's scaled logits by another word; mT5's are never those."""
    return config["model_type"] == "t5" and bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))


def _t5_alias(name: str) -> str:
    return "shared.weight" if name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight") else name


# ---- GPT-1


def _gpt_entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("transformer.tokens_embed.weight", ("token_embedder/embedding",))
    yield Entry("transformer.positions_embed.weight", ("position_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layers_{i}"
        sublayers = (
            ("attn.c_attn", ("self_attention/query", "self_attention/key", "self_attention/value"), 1),
            ("attn.c_proj", ("self_attention/out",), 2),
            ("mlp.c_fc", ("mlp/wi",), 1),
            ("mlp.c_proj", ("mlp/wo",), 1),
        )
        for name, parts, inputs in sublayers:  # a Conv1D has its inputs first
            yield Entry(f"{theirs}.{name}.weight", tuple(f"{ours}/{part}/kernel" for part in parts), inputs)
            yield Entry(f"{theirs}.{name}.bias", tuple(f"{ours}/{part}/bias" for part in parts), inputs=0)
        for name, norm in (("ln_1", "post_self_attention_layer_norm"), ("ln_2", "post_mlp_layer_norm")):
            yield Entry(f"{theirs}.{name}.weight", (f"{ours}/{norm}/scale",))
            yield Entry(f"{theirs}.{name}.bias", (f"{ours}/{norm}/bias",))


def _gpt_to_theirs(c: TransformerConfig) -> dict[str, Any] | None:
    is_gpt = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "learned", "layer", "post", "standard")
        and c.mlp_activations == ("gelu",)
        and c.use_bias
        and c.logits_via_embedding
        and (c.kv_heads, c.num_heads * c.head_dim, c.mlp_dim) == (c.num_heads, c.emb_dim, 4 * c.emb_dim)
    )
    if not is_gpt:
        return None
    return {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "vocab_size": c.vocab_size,
        "n_embd": c.emb_dim,
        "n_head": c.num_heads,
        "n_layer": c.num_decoder_layers,
        "n_positions": c.max_positions,
        "afn": "gelu",
        "layer_norm_epsilon": c.norm_epsilon,
        **{name: c.dropout_rate for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
        **_DECODER_TOKENS,
    }  # fmt: skip


_DECODER_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def _gpt_to_ours(config: Mapping[str, Any]) -> TransformerConfig:
    if config.get("afn", "gelu") != "gelu":
        raise UserError(f'config.json has afn "{config["afn"]}"; of GPT-1 t5x_lab reads models with "gelu".')
    return TransformerConfig(
        architecture="causal_decoder",
        vocab_size=config["vocab_size"],
        emb_dim=config["n_embd"],
        num_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        mlp_dim=4 * config["n_embd"],
        num_decoder_layers=config["n_layer"],
        mlp_activations=("gelu",),
        logits_via_embedding=True,
        scaling="standard",
        positions="learned",
        max_positions=config.get("n_positions", 512),
        norm="layer",
        norm_position="post",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        use_bias=True,
    )


def _gpt_alias(name: str) -> str:
    if name == "lm_head.weight":
        return "transformer.tokens_embed.weight"
    return name if name.startswith("transformer.") else f"transformer.{name}"


# ---- Llama


def _llama_entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("model.embed_tokens.weight", ("token_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
        yield Entry(f"{theirs}.input_layernorm.weight", (f"{ours}/pre_self_attention_layer_norm/scale",))
        for letter, which in (("q", "query"), ("k", "key"), ("v", "value")):
            yield linear(f"{theirs}.self_attn.{letter}_proj", f"{ours}/self_attention/{which}")
        yield linear(f"{theirs}.self_attn.o_proj", f"{ours}/self_attention/out", inputs=2)
        yield Entry(f"{theirs}.post_attention_layernorm.weight", (f"{ours}/pre_mlp_layer_norm/scale",))
        for name, which in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            yield linear(f"{theirs}.mlp.{name}_proj", f"{ours}/mlp/{which}")
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _llama_to_theirs(c: TransformerConfig) -> dict[str, Any] | None:
    is_llama = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "rotary", "rms", "pre", "standard")
        and c.mlp_activations in (("silu", "linear"), ("swish", "linear"))
        and not c.use_bias
        and c.emb_dim % c.num_heads == 0
    )
    if not is_llama:
        return None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.emb_dim,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_decoder_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 2048,  # a hint for serving; rotations know no end
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": False,
        "mlp_bias": False,
        **_DECODER_TOKENS,
    }  # fmt: skip


def _llama_to_ours(config: Mapping[str, Any]) -> TransformerConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or theta != 10000.0 or config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError(
            f'config.json has rotations of type "{kind}" and base {theta:g}, or biases; of Llama\'s kind t5x_lab reads models '
            "with plain rotations of base 10,000 and without biases."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(
            f'config.json has hidden_act "{config["hidden_act"]}"; of Llama\'s kind t5x_lab reads models with "silu".'
        )
    return TransformerConfig(
        architecture="causal_decoder",
        vocab_size=config["vocab_size"],
        emb_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        mlp_dim=config["intermediate_size"],
        num_decoder_layers=config["num_hidden_layers"],
        mlp_activations=("silu", "linear"),
        logits_via_embedding=config.get("tie_word_embeddings", False),
        scaling="standard",
        positions="rotary",
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


_T5 = Family(_t5_entries, _t5_to_theirs, _t5_to_ours, _t5_alias)
FAMILIES = {
    "t5": _T5,
    "mt5": _T5,
    "openai-gpt": Family(_gpt_entries, _gpt_to_theirs, _gpt_to_ours, _gpt_alias),
    "llama": Family(_llama_entries, _llama_to_theirs, _llama_to_ours, lambda name: name),
}


def family_of(config: NetworkConfig) -> tuple[Family, dict[str, Any]]:
    """The family that a network of ours belongs to, and its config.json.

    Raises:
      UserError: when it belongs to none.
    """
    for family in dict.fromkeys(FAMILIES.values()):
        theirs = family.to_theirs(config) if isinstance(config, TransformerConfig) else None
        if theirs:
            return family, theirs
    raise UserError(
        "transformers has no class for this network. What it has: encoder-decoders with relative biases (T5), causal decoders "
        "with learned positions, post-norm and biases (GPT-1), and causal decoders with rotary positions, RMS norms and gated "
        "SiLU (Llama)."
    )
