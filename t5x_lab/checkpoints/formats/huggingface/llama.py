"""Llama, Mistral, Qwen, SmolLM3 and OLMo 2: causal decoders with rotary positions, RMS norms and gated SiLU.

Qwen 2 has biases of queries, keys and values; Qwen 3 has norms of queries and keys. Mistral has sliding windows in all layers,
SmolLM3 layers without rotary positions. OLMo 2 has norms of the outputs of sub-layers, and of all heads together.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.class_defaults import with_defaults
from t5x_lab.checkpoints.formats.huggingface.layer_types import (
    FULL,
    SLIDING,
    has_plain_windows,
    layer_types,
    local_window,
    read_layer_types,
    shortest_pattern,
)
from t5x_lab.checkpoints.formats.huggingface.rotary import MAX_LENGTH, longest_without_scaling, rotations, scaling_to_hf
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import TransformerShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.transformer import TransformerConfig

_NORMS = {"input_layernorm": "self_attention_norm", "post_attention_layernorm": "mlp_norm"}
_OLMO_NORMS = {"post_attention_layernorm": "self_attention_norm", "post_feedforward_layernorm": "mlp_norm"}
_CLASSES = {"smollm3": "SmolLM3", "olmo2": "Olmo2"}


def projections(source: str, target: str) -> Iterator[Entry]:
    """Yields the projections of a layer, with the same names in Llama and Gemma 2."""
    for letter, projection in (("q", "query"), ("k", "key"), ("v", "value")):
        yield linear(f"{source}.self_attn.{letter}_proj", f"{target}/self_attention/{projection}")
    yield linear(f"{source}.self_attn.o_proj", f"{target}/self_attention/out", inputs=2)
    for name, projection in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
        yield linear(f"{source}.mlp.{name}_proj", f"{target}/mlp/{projection}")


def sizes(c: TransformerShape) -> dict[str, int]:
    """Returns the sizes in config.json, with the names of Llama and Gemma 2."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.emb_dim,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_decoder_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
    }


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("model.embed_tokens.weight", ("token_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        source, target = f"model.layers.{i}", f"decoder/layers_{i}"
        for name, norm in (_OLMO_NORMS if c.norm_position == "output" else _NORMS).items():
            yield Entry(f"{source}.{name}.weight", (f"{target}/{norm}/scale",))
        yield from projections(source, target)
        yield from _biases(c, source, target)
        yield from head_norms(c, source, target)
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def head_norms(c: TransformerConfig, source: str, target: str, less: float = 0.0) -> Iterator[Entry]:
    """Yields the norms of queries and keys, if there are any."""
    for letter, projection in (("q", "query"), ("k", "key")) if c.qk_norm else ():
        norm = f"{target}/self_attention/{projection}_norm/scale"
        yield Entry(f"{source}.self_attn.{letter}_norm.weight", (norm,), inputs=0, less=less)


def _biases(c: TransformerConfig, source: str, target: str) -> Iterator[Entry]:
    attention = {"q": "query", "k": "key", "v": "value"} if c.has_bias("qkv") else {}
    attention |= {"o": "out"} if c.has_bias("out") else {}
    for letter, projection in attention.items():
        yield Entry(f"{source}.self_attn.{letter}_proj.bias", (f"{target}/self_attention/{projection}/bias",), inputs=0)
    for name, projection in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")) if c.has_bias("mlp") else ():
        yield Entry(f"{source}.mlp.{name}_proj.bias", (f"{target}/mlp/{projection}/bias",), inputs=0)


def _kind(c: TransformerConfig) -> str | None:
    """Returns the model_type with these biases, norms and kinds of layers, or None."""
    qkv, out, mlp = (c.has_bias(name) for name in ("qkv", "out", "mlp"))
    is_plain = not c.layer_pattern
    if c.norm_position == "output":
        return "olmo2" if c.qk_norm == "all_heads" and qkv == out and not mlp and is_plain else None
    if not has_plain_windows(c) or c.qk_norm == "all_heads":
        return None
    is_rotated = all(kind.rotary for kind in c.kinds)
    if c.qk_norm:
        return "qwen3" if qkv == out and not mlp and is_rotated else None
    if qkv == out:
        if is_plain:
            return "llama"
        return "mistral" if len(c.kinds) == 1 and is_rotated and not (c.use_bias or c.rotary_scaling) else "smollm3"
    return "qwen2" if qkv and not mlp and c.num_heads * c.head_dim == c.emb_dim and is_rotated else None


def with_prefix(name: str) -> str:
    """Returns the name of a tensor with the prefix "model.", which is missing if the inner model was saved."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    kind = _kind(c)
    is_llama = (
        (c.architecture, c.positions, c.norm, c.scaling) == ("causal_decoder", "rotary", "rms", "standard")
        and c.norm_position in ("pre", "output")
        and c.mlp_activations in (("silu", "linear"), ("swish", "linear"))
        and c.emb_dim % c.num_heads == 0  # required by transformers
        and c.query_pre_attn_scalar in (None, c.head_dim)
    )
    if kind is None or not is_llama:
        return None
    return {
        "architectures": [f"{_CLASSES.get(kind, kind.capitalize())}ForCausalLM"],
        "model_type": kind,
        **sizes(c),
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rotary_theta,
        "rope_parameters": {"rope_theta": c.rotary_theta, **scaling_to_hf(c.rotary_scaling)},
        "max_position_embeddings": c.max_positions or MAX_LENGTH * round(c.rotary_scaling.factor if c.rotary_scaling else 1),
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": c.has_bias("out"),
        "mlp_bias": c.has_bias("mlp"),
        **_kinds_to_hf(c, kind),
    }  # fmt: skip


def _kinds_to_hf(c: TransformerConfig, model_type: str) -> dict[str, Any]:
    """Returns the settings of windows, and of layers without rotary positions."""
    if model_type == "mistral":
        return {"sliding_window": local_window(c)}
    settings: dict[str, Any] = {}
    if local_window(c):
        types = layer_types(c, c.num_decoder_layers)
        settings |= {"use_sliding_window": True, "sliding_window": local_window(c), "layer_types": types}
        settings |= {"max_window_layers": types.index(SLIDING)} if model_type.startswith("qwen") else {}
    if model_type == "smollm3":
        settings["no_rope_layers"] = [int(c.kinds[kind].rotary) for kind in c.kinds_of_layers(c.num_decoder_layers)]
    return settings


def _kinds_from_hf(config: Mapping[str, Any]) -> list[LayerKind]:
    """Returns the kind of each layer."""
    model_type, layers, window = config["model_type"], config["num_hidden_layers"], config["sliding_window"]
    if model_type == "mistral":
        return [LayerKind(window=window)] * layers
    has_windows = model_type not in ("llama", "olmo2") and config["use_sliding_window"] and window
    rotated = [True] * layers
    if model_type == "smollm3":
        interval = config["no_rope_layer_interval"]
        rotated = list(map(bool, config.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]))
        if len(rotated) != layers:
            raise UserError(f"config.json has no_rope_layers of {len(rotated)} layers, and num_hidden_layers {layers}.")
        default = [FULL if is_rotated else SLIDING for is_rotated in rotated]
    else:
        default = [FULL if i < config.get("max_window_layers", layers) else SLIDING for i in range(layers)]
    types = read_layer_types(config, default) if has_windows else [FULL] * layers
    return [LayerKind(window if kind == SLIDING else None, rotary=rotary) for kind, rotary in zip(types, rotated)]


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    config = with_defaults(config, config["model_type"])
    theta, scaling = rotations(config)
    if config["hidden_act"] != "silu":
        raise UserError(
            f'config.json has hidden_act "{config["hidden_act"]}". For the relatives of Llama t5x_lab supports "silu" only.'
        )
    attention = ("qkv", "out") if config["attention_bias"] else ("qkv",) if config["model_type"] == "qwen2" else ()
    is_olmo = config["model_type"] == "olmo2"
    biases = (*attention, *(("mlp",) if config["mlp_bias"] else ()))
    return TransformerConfig(
        architecture="causal_decoder",
        vocab_size=config["vocab_size"],
        emb_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"] or config["hidden_size"] // config["num_attention_heads"],
        mlp_dim=config["intermediate_size"],
        num_decoder_layers=config["num_hidden_layers"],
        mlp_activations=("silu", "linear"),
        logits_via_embedding=config["tie_word_embeddings"],
        scaling="standard",
        positions="rotary",
        rotary_theta=theta,
        max_positions=config["max_position_embeddings"],
        layer_pattern=shortest_pattern(_kinds_from_hf(config)),
        qk_norm="all_heads" if is_olmo else config["model_type"] == "qwen3",
        rotary_scaling=scaling,
        use_bias=biases or False,
        longest_sequence=longest_without_scaling(config),
        norm_position="output" if is_olmo else "pre",
        norm_epsilon=config["rms_norm_eps"],
    )


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, with_prefix)
