"""T5Gemma 2: encoder-decoders of Gemma 3's blocks with merged attention and one table of embeddings. The text model is read.

transformers has no class without a vision tower. A directory that is written has the settings of a small one and no tensors of
it, so that transformers draws them at random; texts do not use them. The end of an image has a vector of its own in
transformers. Here it has its row of the table, and in a directory that is written no id is the end of an image.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.class_defaults import with_defaults
from t5x_lab.checkpoints.formats.huggingface.gemma import (
    default_types,
    has_blocks,
    ropes_by_type,
    settings_of_type,
    stack_from_hf,
    stack_to_hf,
)
from t5x_lab.checkpoints.formats.huggingface.layer_types import (
    FULL,
    SLIDING,
)
from t5x_lab.checkpoints.formats.huggingface.llama import head_norms, projections
from t5x_lab.checkpoints.formats.huggingface.rotary import rotations
from t5x_lab.checkpoints.formats.huggingface.t5gemma import shared_layers
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.rotary import RotaryScaling
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 131_072  # only a hint for serving
_TABLE = "model.encoder.text_model.embed_tokens.weight"
_STACKS = {"encoder": "model.encoder.text_model", "decoder": "model.decoder"}
# What the encoder and the decoder must have in common.
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "sliding_window", "max_position_embeddings", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip
_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "image_size": 16, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry(_TABLE, ("token_embedder/embedding",))
    for stack, num_layers in (("encoder", c.num_encoder_layers), ("decoder", c.num_decoder_layers)):
        for i in range(num_layers):
            source, target = f"{_STACKS[stack]}.layers.{i}", f"{stack}/layers_{i}"
            yield from projections(source, target)
            yield from head_norms(c, source, target, less=1.0)
            for name, sublayer in (("self_attn", "self_attention"), ("feedforward", "mlp")):
                yield Entry(f"{source}.pre_{name}_layernorm.weight", (f"{target}/{sublayer}_norm/scale",), less=1.0)
                yield Entry(f"{source}.post_{name}_layernorm.weight", (f"{target}/{sublayer}_output_norm/scale",), less=1.0)
        yield Entry(f"{_STACKS[stack]}.norm.weight", (f"{stack}/final_norm/scale",), less=1.0)
    if not c.logits_via_embedding:
        yield linear("lm_head.out_proj", "logits_dense")


def _name_in_text_model(name: str) -> str | None:
    """Returns the name of a tensor in the text model, which transformers leaves out when it saves a model.

    None for those of images, such as the embedding of an image's end.
    """
    if name.startswith(("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")) or name.endswith(
        "eoi_embedding"
    ):
        return None
    if name == "model.decoder.embed_tokens.weight":
        return _TABLE
    return re.sub(r"^model\.encoder\.(embed_tokens|layers|norm)\.", r"model.encoder.text_model.\1.", name)


def _encoder_window(window: int) -> tuple[int, int]:
    return (window + 1) // 2 - 1, window // 2


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    fits = lambda kind: kind.encoder_window == (_encoder_window(kind.window) if kind.window else None)
    is_t5gemma2 = (
        c.architecture == "encoder_decoder"
        and has_blocks(c)
        and c.merged_attention
        and c.share_embeddings
        and c.qk_norm is True
        and not (c.share_stacks or c.attention_logit_cap or c.encoder or c.rotary_cross_attention)
        and all(map(fits, c.kinds))
    )
    ropes = ropes_by_type(c) if is_t5gemma2 else None
    if ropes is None:
        return None
    stack = lambda model_type, num_layers: {
        "model_type": model_type, **stack_to_hf(c, num_layers, _MAX_LENGTH), "rope_parameters": ropes,
    }  # fmt: skip
    return {
        "architectures": ["T5Gemma2ForConditionalGeneration"],
        "model_type": "t5gemma2",
        "is_encoder_decoder": True,
        "tie_word_embeddings": c.logits_via_embedding,
        "encoder": {
            "model_type": "t5gemma2_encoder", "text_config": stack("t5gemma2_text", c.num_encoder_layers),
            "vision_config": _VISION, "mm_tokens_per_image": 4, "eoi_token_index": c.vocab_size,
        },
        "decoder": stack("t5gemma2_decoder", c.num_decoder_layers),
    }  # fmt: skip


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    encoder = with_defaults((config.get("encoder") or {}).get("text_config"), "t5gemma2")
    decoder = with_defaults(config.get("decoder"), "t5gemma2")
    default = lambda stack: default_types(stack, stack["sliding_window_pattern"])
    kinds = shared_layers(encoder, decoder, _SHARED, _rotations, default)
    if decoder["attn_logit_softcapping"]:
        raise UserError("config.json has attn_logit_softcapping, which merged attention of t5x_lab does not have.")
    window = decoder["sliding_window"]
    local = LayerKind()
    if SLIDING in kinds:
        theta, scaling = rotations(settings_of_type(decoder, SLIDING))
        local = LayerKind(window, _encoder_window(window), rotary_theta=theta, rotary_scaling=scaling)
    return TransformerConfig(
        architecture="encoder_decoder",
        **stack_from_hf(decoder, settings_of_type(decoder, FULL), kinds, local),
        num_encoder_layers=encoder["num_hidden_layers"],
        merged_attention=True,
        logits_via_embedding=config.get("tie_word_embeddings", True),
        qk_norm=True,
    )


def _rotations(stack: Mapping[str, Any]) -> list[tuple[float, RotaryScaling | None]]:
    return [rotations(settings_of_type(stack, kind)) for kind in (FULL, SLIDING)]


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, _name_in_text_model)
