"""Gemma 2 and Gemma 3: Llamas with norms before and after sub-layers, scaled embeddings, and local and global layers.

Norm scales are stored as the difference from 1. Gemma 2 has capped logits. Gemma 3 has norms of queries and keys, and rotary
positions of their own in local layers. Of a multimodal Gemma 3 the text model is read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.layer_types import (
    FULL,
    SLIDING,
    has_plain_windows,
    layer_types,
    read_layer_types,
    shortest_pattern,
    window_of,
)
from t5x_lab.checkpoints.formats.huggingface.llama import head_norms, projections, sizes, with_prefix
from t5x_lab.checkpoints.formats.huggingface.rotary import longest_without_scaling, rotations, scaling_to_hf
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import TransformerShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 8192  # only a hint for serving
_NORMS = {
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "self_attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
BLOCKS: dict[str, Any] = {  # what all relatives of Gemma 2 have in common
    "mlp_activations": ("gelu", "linear"),
    "scaling": "standard",
    "positions": "rotary",
    "norm": "rms",
    "norm_position": "both",
    "scale_embeddings": True,
}
_VISION = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("model.embed_tokens.weight", ("token_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        source, target = f"model.layers.{i}", f"decoder/layers_{i}"
        for name, norm in _NORMS.items():
            yield Entry(f"{source}.{name}.weight", (f"{target}/{norm}/scale",), less=1.0)
        yield from projections(source, target)
        yield from head_norms(c, source, target, less=1.0)
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",), less=1.0)
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _name_in_text_model(name: str) -> str | None:
    """Returns the name of a tensor in a model of text alone; None for a tensor of the vision tower."""
    if name.startswith(_VISION):
        return None
    for prefix, text_prefix in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.", ""),
    ):
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return with_prefix(name)


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    is_gemma = c.architecture == "causal_decoder" and has_blocks(c)
    if not is_gemma or c.qk_norm not in (True, False):
        return None
    positions = _gemma_3_positions(c) if c.qk_norm else _gemma_2_positions(c)
    if positions is None:
        return None
    return {
        **stack_to_hf(c, c.num_decoder_layers, c.longest_sequence or _MAX_LENGTH),
        "sliding_window": window_of(c) or _MAX_LENGTH,
        **positions,
    }


def has_blocks(c: TransformerShape) -> bool:
    """Returns whether the blocks of a network are Gemma's, with sizes that transformers accepts."""
    return (
        all(getattr(c, name) == value for name, value in BLOCKS.items())
        and not c.use_bias
        and c.emb_dim % c.num_heads == 0
        and (c.query_pre_attn_scalar or 1.0) % 1 == 0  # a whole number
    )


def stack_to_hf(c: TransformerShape, num_layers: int, max_length: int) -> dict[str, Any]:
    """Returns the settings of a stack of Gemma's blocks, without its rotary positions.

    Args:
      c: sizes of the stack.
      num_layers: number of its layers.
      max_length: maximum length for serving, if the network has none.
    """
    return {
        **sizes(c),
        "num_hidden_layers": num_layers,
        "query_pre_attn_scalar": round(c.query_pre_attn_scalar or c.head_dim),
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": c.attention_logit_cap,
        "final_logit_softcapping": c.logit_cap,
        "layer_types": layer_types(c, num_layers),
        "sliding_window": window_of(c) or max_length,
        "max_position_embeddings": c.max_positions or max_length,
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": False,
    }


def _gemma_2_positions(c: TransformerConfig) -> dict[str, Any] | None:
    """Returns the model type and its rotary positions, None if Gemma 2 has no such layers."""
    if not has_plain_windows(c) or not all(kind.rotary for kind in c.kinds):
        return None
    rope = {"rope_theta": c.rotary_theta, **scaling_to_hf(c.rotary_scaling)}
    return {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rope_theta": c.rotary_theta, "rope_parameters": rope,
    }  # fmt: skip


def _gemma_3_positions(c: TransformerConfig) -> dict[str, Any] | None:
    """Returns the model type and its rotary positions, None if Gemma 3 has no such layers."""
    ropes = ropes_by_type(c)
    has_plain = all(kind.encoder_window is None for kind in c.kinds)
    if ropes is None or not has_plain or c.attention_logit_cap is not None:
        return None
    return {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_parameters": ropes}


def ropes_by_type(c: TransformerConfig) -> dict[str, dict[str, Any]] | None:
    """Returns rotary positions by type of layer; None if not all layers of a type have the same ones and the same window."""
    ropes: dict[str, dict[str, Any]] = {}
    for kind in c.kinds:
        theta, scaling = kind.rotary_settings(c.rotary_theta, c.rotary_scaling)
        rope = {"rope_theta": theta, **scaling_to_hf(scaling)}
        is_one = ropes.setdefault(SLIDING if kind.window else FULL, rope) == rope and kind.window in (None, window_of(c))
        if not (is_one and kind.rotary):
            return None
    unused = {"rope_type": "default", "rope_theta": c.rotary_theta}
    return {name: ropes.get(name, unused) for name in (FULL, SLIDING)}


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    config = {**config, **(config.get("text_config") or {})}  # of a multimodal model
    is_gemma_3 = config["model_type"] == "gemma3_text"
    check_gemma(config)
    head_dim, scalar = config.get("head_dim", 256), config.get("query_pre_attn_scalar", 256)
    pattern = [SLIDING] * (config.get("sliding_window_pattern", 6) - 1) + [FULL] if is_gemma_3 else [SLIDING, FULL]
    local = LayerKind(window=config.get("sliding_window", 4096))
    theta, scaling, longest = 10_000.0, None, None
    if is_gemma_3:
        theta, scaling = rope_of_type(config, FULL, "rope_theta", 1_000_000.0)
        local_theta, local_scaling = rope_of_type(config, SLIDING, "rope_local_base_freq", 10_000.0)
        local = LayerKind(local.window, rotary_theta=local_theta, rotary_scaling=local_scaling)
    else:
        theta, scaling = rotations(config)
        longest = longest_without_scaling(config)
    kinds = [local if kind == SLIDING else LayerKind() for kind in read_layer_types(config, pattern)]
    cap = lambda name, default: config.get(name, None if is_gemma_3 else default)
    return TransformerConfig(
        architecture="causal_decoder",
        vocab_size=config.get("vocab_size", 262_208),
        emb_dim=config.get("hidden_size", 2304),
        num_heads=config.get("num_attention_heads", 8),
        num_kv_heads=config.get("num_key_value_heads", 4),
        head_dim=head_dim,
        mlp_dim=config.get("intermediate_size", 9216),
        num_decoder_layers=config.get("num_hidden_layers", 26),
        **BLOCKS,
        logits_via_embedding=config.get("tie_word_embeddings", True),
        rotary_theta=theta,
        rotary_scaling=scaling,
        max_positions=config.get("max_position_embeddings", 131_072 if is_gemma_3 else _MAX_LENGTH),
        layer_pattern=shortest_pattern(kinds),
        qk_norm=is_gemma_3,
        query_pre_attn_scalar=None if scalar == head_dim else float(scalar),
        attention_logit_cap=cap("attn_logit_softcapping", 50.0),
        logit_cap=cap("final_logit_softcapping", 30.0),
        longest_sequence=longest,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


def check_gemma(config: Mapping[str, Any]) -> None:
    """Raises a `UserError` for settings of Gemma's classes that no published model has."""
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or config.get("attention_bias"):
        raise UserError(
            "config.json has an activation or biases that t5x_lab does not support for Gemma. Use a model with "
            "gelu_pytorch_tanh and without biases."
        )
    if config.get("use_bidirectional_attention"):
        raise UserError("config.json has bidirectional attention, which t5x_lab does not read for Gemma.")


def rope_of_type(config: Mapping[str, Any], kind: str, theta_name: str, theta: float) -> tuple[float, Any]:
    """Returns base and scaling of rotary positions of a type of layers, also from a config.json before transformers 5."""
    by_kind = config.get("rope_parameters") or {}
    scaling = (config.get("rope_scaling") or {}) if kind == FULL else {}
    return rotations({"rope_parameters": {"rope_theta": config.get(theta_name, theta), **scaling, **by_kind.get(kind, {})}})


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, _name_in_text_model)
