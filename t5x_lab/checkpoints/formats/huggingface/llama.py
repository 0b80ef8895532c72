"""Llama, and Qwen 3: causal decoders with rotary positions, RMS norms and a gated SiLU; Qwen 3's norm queries and keys too."""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.table import DECODER_TOKENS, Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import RotaryScaling
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 2048  # a hint for serving; rotations know no end


def projections(theirs: str, ours: str) -> Iterator[Entry]:
    """The matrices of a layer, which Gemma 2 has under the same names."""
    for letter, which in (("q", "query"), ("k", "key"), ("v", "value")):
        yield linear(f"{theirs}.self_attn.{letter}_proj", f"{ours}/self_attention/{which}")
    yield linear(f"{theirs}.self_attn.o_proj", f"{ours}/self_attention/out", inputs=2)
    for name, which in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
        yield linear(f"{theirs}.mlp.{name}_proj", f"{ours}/mlp/{which}")


def sizes(c: TransformerConfig) -> dict[str, int]:
    """The sizes of config.json, under the names of Llama and Gemma 2."""
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
        theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
        yield Entry(f"{theirs}.input_layernorm.weight", (f"{ours}/self_attention_norm/scale",))
        yield from projections(theirs, ours)
        for letter, which in (("q", "query"), ("k", "key")) if c.qk_norm else ():
            yield Entry(f"{theirs}.self_attn.{letter}_norm.weight", (f"{ours}/self_attention/{which}_norm/scale",))
        yield Entry(f"{theirs}.post_attention_layernorm.weight", (f"{ours}/mlp_norm/scale",))
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _to_theirs(c: TransformerConfig) -> dict[str, Any] | None:
    is_llama = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "rotary", "rms", "pre", "standard")
        and c.mlp_activations in (("silu", "linear"), ("swish", "linear"))
        and not c.use_bias
        and c.emb_dim % c.num_heads == 0  # transformers insists, though head_dim is free
    )
    if not is_llama:
        return None
    return {
        "architectures": ["Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if c.qk_norm else "llama",
        **sizes(c),
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rotary_theta,
        "rope_parameters": {"rope_theta": c.rotary_theta, **_scaling_to_theirs(c.rotary_scaling)},
        "max_position_embeddings": _MAX_LENGTH * round(c.rotary_scaling.factor if c.rotary_scaling else 1),
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": False,
        "mlp_bias": False,
        **DECODER_TOKENS,
    }  # fmt: skip


def _scaling_to_theirs(scaling: RotaryScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _scaling_to_ours(rope: Mapping[str, Any]) -> RotaryScaling:
    return RotaryScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_length=rope["original_max_position_embeddings"],
    )


def _to_ours(config: Mapping[str, Any]) -> TransformerConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError(
            f'config.json has rotations of type "{kind}", or biases; of Llama\'s kind t5x_lab reads models with rotations of '
            'type "default" or "llama3" and without biases.'
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
        rotary_theta=float(theta),
        qk_norm=config["model_type"] == "qwen3",
        rotary_scaling=_scaling_to_ours(rope) if kind == "llama3" else None,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


FAMILY = Family(_entries, _to_theirs, _to_ours, lambda name: name)
