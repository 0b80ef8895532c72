"""Gemma 2: Llama with capped logits, norms before and after sub-layers, and scaled embeddings.

Norm scales are stored as the difference from 1. Half of its layers have sliding-window attention; ours have full attention, so
sequences longer than the window are rejected.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.llama import (
    longest_without_scaling,
    projections,
    rotations,
    scaling_to_hf,
    sizes,
    with_prefix,
)
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 8192  # only a hint for serving
_NORMS = {
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "self_attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("model.embed_tokens.weight", ("token_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        source, target = f"model.layers.{i}", f"decoder/layers_{i}"
        for name, norm in _NORMS.items():
            yield Entry(f"{source}.{name}.weight", (f"{target}/{norm}/scale",), less=1.0)
        yield from projections(source, target)
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",), less=1.0)
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    is_gemma = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "rotary", "rms", "both", "standard")
        and c.mlp_activations == ("gelu", "linear")
        and c.scale_embeddings
        and not (c.use_bias or c.qk_norm)
        and (c.query_pre_attn_scalar or 1.0) % 1 == 0  # transformers wants a whole number
    )
    if not is_gemma:
        return None
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **sizes(c),
        "query_pre_attn_scalar": round(c.query_pre_attn_scalar or c.head_dim),
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": c.attention_logit_cap,
        "final_logit_softcapping": c.logit_cap,
        "layer_types": [
            "sliding_attention" if c.longest_sequence and i % 2 == 0 else "full_attention" for i in range(c.num_decoder_layers)
        ],
        "sliding_window": c.longest_sequence or _MAX_LENGTH,
        "max_position_embeddings": c.max_positions or c.longest_sequence or _MAX_LENGTH,
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rotary_theta,
        "rope_parameters": {"rope_theta": c.rotary_theta, **scaling_to_hf(c.rotary_scaling)},
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": False,
    }  # fmt: skip


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    theta, scaling = rotations(config)
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or config.get("attention_bias"):
        raise UserError(
            "config.json has an activation or biases that t5x_lab does not support for Gemma 2. Use a model with "
            "gelu_pytorch_tanh and without biases."
        )
    head_dim, scalar = config.get("head_dim", 256), config.get("query_pre_attn_scalar", 256)
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"]
    has_windows = "sliding_attention" in kinds
    return TransformerConfig(
        architecture="causal_decoder",
        vocab_size=config["vocab_size"],
        emb_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        mlp_dim=config["intermediate_size"],
        num_decoder_layers=config["num_hidden_layers"],
        mlp_activations=("gelu", "linear"),
        logits_via_embedding=config.get("tie_word_embeddings", True),
        scaling="standard",
        positions="rotary",
        rotary_theta=theta,
        rotary_scaling=scaling,
        max_positions=config.get("max_position_embeddings", _MAX_LENGTH),
        query_pre_attn_scalar=None if scalar == head_dim else float(scalar),
        attention_logit_cap=config.get("attn_logit_softcapping", 50.0),
        logit_cap=config.get("final_logit_softcapping", 30.0),
        scale_embeddings=True,
        longest_sequence=longest_without_scaling(config, config.get("sliding_window", 4096) if has_windows else None),
        norm_position="both",
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, with_prefix)
