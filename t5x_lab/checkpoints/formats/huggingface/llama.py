"""Llama, Mistral and Qwen: causal decoders with rotary positions, RMS norms and gated SiLU.

Qwen 2 has biases of queries, keys and values; Qwen 3 has norms of queries and keys. Mistral is a Llama, of which
early versions have sliding windows.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import RotaryScaling
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 2048  # only a hint for serving


def projections(source: str, target: str) -> Iterator[Entry]:
    """Yields the projections of a layer, with the same names in Llama and Gemma 2."""
    for letter, projection in (("q", "query"), ("k", "key"), ("v", "value")):
        yield linear(f"{source}.self_attn.{letter}_proj", f"{target}/self_attention/{projection}")
    yield linear(f"{source}.self_attn.o_proj", f"{target}/self_attention/out", inputs=2)
    for name, projection in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
        yield linear(f"{source}.mlp.{name}_proj", f"{target}/mlp/{projection}")


def sizes(c: TransformerConfig) -> dict[str, int]:
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
        yield Entry(f"{source}.input_layernorm.weight", (f"{target}/self_attention_norm/scale",))
        yield from projections(source, target)
        yield from _biases(c, source, target)
        for letter, projection in (("q", "query"), ("k", "key")) if c.qk_norm else ():
            yield Entry(f"{source}.self_attn.{letter}_norm.weight", (f"{target}/self_attention/{projection}_norm/scale",))
        yield Entry(f"{source}.post_attention_layernorm.weight", (f"{target}/mlp_norm/scale",))
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _biases(c: TransformerConfig, source: str, target: str) -> Iterator[Entry]:
    attention = {"q": "query", "k": "key", "v": "value"} if c.has_bias("qkv") else {}
    attention |= {"o": "out"} if c.has_bias("out") else {}
    for letter, projection in attention.items():
        yield Entry(f"{source}.self_attn.{letter}_proj.bias", (f"{target}/self_attention/{projection}/bias",), inputs=0)
    for name, projection in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")) if c.has_bias("mlp") else ():
        yield Entry(f"{source}.mlp.{name}_proj.bias", (f"{target}/mlp/{projection}/bias",), inputs=0)


def _kind(c: TransformerConfig) -> str | None:
    """Returns the model_type with these biases and norms, or None."""
    qkv, out, mlp = (c.has_bias(name) for name in ("qkv", "out", "mlp"))
    if c.qk_norm:
        return "qwen3" if qkv == out and not mlp else None
    if qkv == out:
        return "llama"
    return "qwen2" if qkv and not mlp and c.num_heads * c.head_dim == c.emb_dim else None


def with_prefix(name: str) -> str:
    """Returns the name of a tensor with the prefix "model.", which is missing if the inner model was saved."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    is_llama = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "rotary", "rms", "pre", "standard")
        and c.mlp_activations in (("silu", "linear"), ("swish", "linear"))
        and _kind(c)
        and c.emb_dim % c.num_heads == 0  # required by transformers
        and c.query_pre_attn_scalar in (None, c.head_dim)
        and not (_kind(c) == "llama" and c.longest_sequence and (c.use_bias or c.rotary_scaling))  # only Mistral has windows
    )
    if not is_llama:
        return None
    kind = "mistral" if c.longest_sequence and _kind(c) == "llama" else str(_kind(c))
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **sizes(c),
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rotary_theta,
        "rope_parameters": {"rope_theta": c.rotary_theta, **scaling_to_hf(c.rotary_scaling)},
        "max_position_embeddings": c.max_positions or _MAX_LENGTH * round(c.rotary_scaling.factor if c.rotary_scaling else 1),
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": c.has_bias("out"),
        "mlp_bias": c.has_bias("mlp"),
        **(_windows_to_hf(kind, c.longest_sequence) if c.longest_sequence else {}),
    }  # fmt: skip


def _windows_to_hf(kind: str, length: int) -> dict[str, Any]:
    """Returns settings with windows in all layers. For sequences within the window this makes no difference."""
    if kind == "mistral":
        return {"sliding_window": length}
    return {"use_sliding_window": True, "sliding_window": length, "max_window_layers": 0}


def scaling_to_hf(scaling: RotaryScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_slow": scaling.low_freq_factor,
            "beta_fast": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
        }
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _scaling_from_hf(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> RotaryScaling | None:
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return RotaryScaling(factor=float(rope["factor"]), kind="linear")
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        factor = float(rope.get("factor") or config["max_position_embeddings"] / length)
        return RotaryScaling(
            factor=factor,
            kind="yarn",
            low_freq_factor=float(rope.get("beta_slow") or 1),
            high_freq_factor=float(rope.get("beta_fast") or 32),
            original_length=length,
            attention_factor=_attention_factor(rope, factor),
        )
    return RotaryScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_length=rope["original_max_position_embeddings"],
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Returns the factor of queries and keys that YaRN's settings give (Peng et al. 2023, equation 22)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns type and settings of rotary positions from a config.json of any version of `transformers`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type", "default")), rope


def rotations(config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Returns base and scaling of rotary positions.

    The type "dynamic" changes nothing up to the length of the original training, see `longest_without_scaling`.
    """
    kind, rope = _rope(config)
    is_partial = rope.get("partial_rotary_factor", 1.0) != 1.0 or not rope.get("truncate", True)
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn") or is_partial:
        raise UserError(
            f'config.json has rotary positions of type "{kind}", or of a part of each head. t5x_lab supports the types '
            '"default", "linear", "dynamic", "llama3" and "yarn" of whole heads, without truncate = false.'
        )
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0))), _scaling_from_hf(kind, rope, config)


def longest_without_scaling(config: Mapping[str, Any], window: int | None) -> int | None:
    """Returns the longest sequence that a network without windows and dynamic scaling reads as the model does."""
    limits = [window, config.get("max_position_embeddings", _MAX_LENGTH) if _rope(config)[0] == "dynamic" else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _window(config: Mapping[str, Any]) -> int | None:
    """Returns the sliding window of a Mistral or Qwen, or None. Within the window attention is full."""
    if config["model_type"] == "mistral":
        return config.get("sliding_window", 4096)
    if not config.get("use_sliding_window") or config["model_type"] == "llama":
        return None
    kinds = config.get("layer_types")
    has_windows = "sliding_attention" in kinds if kinds else config.get("max_window_layers", 28) < config["num_hidden_layers"]
    return config.get("sliding_window", 4096) if has_windows else None


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    theta, scaling = rotations(config)
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(
            f'config.json has hidden_act "{config["hidden_act"]}". For Llama, Mistral and Qwen t5x_lab supports "silu" only.'
        )
    attention = ("qkv", "out") if config.get("attention_bias") else ("qkv",) if config["model_type"] == "qwen2" else ()
    biases = (*attention, *(("mlp",) if config.get("mlp_bias") else ()))
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
        rotary_theta=theta,
        max_positions=config.get("max_position_embeddings", _MAX_LENGTH),
        qk_norm=config["model_type"] == "qwen3",
        rotary_scaling=scaling,
        use_bias=biases or False,
        longest_sequence=longest_without_scaling(config, _window(config)),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, with_prefix)
