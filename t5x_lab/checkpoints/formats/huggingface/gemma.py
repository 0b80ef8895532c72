"""Gemma 2 and Gemma 3: Llamas with norms before and after sub-layers, scaled embeddings, and local and global layers.

Norm scales are stored as the difference from 1. Gemma 2 has capped logits. Gemma 3 has norms of queries and keys, and rotary
positions of their own in local layers. Of a multimodal Gemma 3 the text model is read.
"""

from collections.abc import Iterator, Mapping, Sequence
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
# Sizes of a stack, and the transformer's fields.
SIZES = {
    "hidden_size": "emb_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
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
        "sliding_window": local_window(c) or max_length,
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
        is_one = ropes.setdefault(SLIDING if kind.window else FULL, rope) == rope and kind.window in (None, local_window(c))
        if not (is_one and kind.rotary):
            return None
    unused = {"rope_type": "default", "rope_theta": c.rotary_theta}
    return {name: ropes.get(name, unused) for name in (FULL, SLIDING)}


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    text = config.get("text_config")  # of a multimodal model
    is_gemma_3 = config["model_type"] in ("gemma3", "gemma3_text")
    config = with_defaults({**config, **(text or {})}, "gemma3_text" if is_gemma_3 else "gemma2")
    check_gemma(config)
    local, full = LayerKind(window=config["sliding_window"]), config
    if is_gemma_3:
        full = settings_of_type(config, FULL)
        local_theta, local_scaling = rotations(settings_of_type(config, SLIDING))
        local = LayerKind(local.window, rotary_theta=local_theta, rotary_scaling=local_scaling)
    types = read_layer_types(config, default_types(config, config["sliding_window_pattern"] if is_gemma_3 else 2))
    return TransformerConfig(
        architecture="causal_decoder",
        **stack_from_hf(config, full, types, local),
        logits_via_embedding=config["tie_word_embeddings"],
        qk_norm=is_gemma_3,
    )


def stack_from_hf(config: Mapping[str, Any], full: Mapping[str, Any], types: Sequence[str], local: LayerKind) -> dict[str, Any]:
    """Returns fields of a `TransformerConfig` for a decoder of Gemma's blocks, the reverse of `stack_to_hf`.

    Args:
      config: settings of the decoder.
      full: settings with the rotary positions of its global layers.
      types: type of each layer; of the deeper stack, if there is an encoder too.
      local: kind of the local layers.
    """
    theta, scaling = rotations(full)
    return {
        "vocab_size": config["vocab_size"],
        **{field: config[name] for name, field in SIZES.items()},
        "num_decoder_layers": config["num_hidden_layers"],
        **BLOCKS,
        "rotary_theta": theta,
        "rotary_scaling": scaling,
        "max_positions": config["max_position_embeddings"],
        "layer_pattern": shortest_pattern([local if kind == SLIDING else LayerKind() for kind in types]),
        "query_pre_attn_scalar": query_scalar(config),
        "attention_logit_cap": config["attn_logit_softcapping"],
        "logit_cap": config["final_logit_softcapping"],
        "longest_sequence": longest_without_scaling(full),
        "norm_epsilon": config["rms_norm_eps"],
    }


def default_types(config: Mapping[str, Any], period: int) -> list[str]:
    """Returns the types of layers if config.json does not list them: every `period`-th one is global."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(config["num_hidden_layers"])]


def query_scalar(config: Mapping[str, Any]) -> float | None:
    """Returns the number whose root divides queries; None for the width of a head."""
    scalar = config["query_pre_attn_scalar"]
    return None if scalar == config["head_dim"] else float(scalar)


def check_gemma(config: Mapping[str, Any]) -> None:
    """Raises a `UserError` for settings of Gemma's classes that no published model has."""
    if config["hidden_activation"] != "gelu_pytorch_tanh" or config["attention_bias"]:
        raise UserError(
            "config.json has an activation or biases that t5x_lab does not support for Gemma. Use a model with "
            "gelu_pytorch_tanh and without biases."
        )
    if config.get("use_bidirectional_attention"):
        raise UserError("config.json has bidirectional attention, which t5x_lab does not read for Gemma.")


def settings_of_type(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the settings whose rotary positions are those of Gemma 3's layers of a type, in any version of transformers."""
    by_type = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") if kind == FULL else None
    theta = config["rope_theta" if kind == FULL else "rope_local_base_freq"]
    rope = {"rope_theta": theta, **(by_type.get(kind) or {}), **(scaling or {})}
    return {**config, "rope_parameters": rope, "rope_scaling": None}


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, _name_in_text_model)
