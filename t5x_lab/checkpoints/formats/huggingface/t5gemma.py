"""T5Gemma: encoder-decoders of Gemma 2's blocks, with embeddings of their own in both stacks, which may differ in size."""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.gemma import BLOCKS, check_gemma, has_blocks, stack_to_hf
from t5x_lab.checkpoints.formats.huggingface.layer_types import (
    FULL,
    SLIDING,
    read_layer_types,
    shortest_pattern,
    window_of,
)
from t5x_lab.checkpoints.formats.huggingface.llama import projections
from t5x_lab.checkpoints.formats.huggingface.rotary import longest_without_scaling, rotations, scaling_to_hf
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import EncoderShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 8192  # only a hint for serving
_SUBLAYERS = {"self_attn": "self_attention", "cross_attn": "cross_attention", "feedforward": "mlp"}
# Sizes of a stack, and the transformer's fields.
_SIZES = {
    "hidden_size": "emb_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
}
_DEFAULTS = {
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
}
# What the encoder and the decoder must have in common.
_SHARED = {
    "vocab_size": 256_000,
    "attn_logit_softcapping": 50.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_position_embeddings": _MAX_LENGTH,
}


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    stacks = (("encoder", c.num_encoder_layers, "encoder_token_embedder"), ("decoder", c.num_decoder_layers, "token_embedder"))
    for stack, num_layers, embedder in stacks:
        yield Entry(f"model.{stack}.embed_tokens.weight", (f"{embedder}/embedding",))
        for i in range(num_layers):
            source, target = f"model.{stack}.layers.{i}", f"{stack}/layers_{i}"
            yield from projections(source, target)
            for name, sublayer in _SUBLAYERS.items():
                if name == "cross_attn" and stack == "encoder":
                    continue
                yield Entry(f"{source}.pre_{name}_layernorm.weight", (f"{target}/{sublayer}_norm/scale",), less=1.0)
                yield Entry(f"{source}.post_{name}_layernorm.weight", (f"{target}/{sublayer}_output_norm/scale",), less=1.0)
            if stack == "decoder":
                for letter, projection in (("q", "query"), ("k", "key"), ("v", "value")):
                    yield linear(f"{source}.cross_attn.{letter}_proj", f"{target}/cross_attention/{projection}")
                yield linear(f"{source}.cross_attn.o_proj", f"{target}/cross_attention/out", inputs=2)
        yield Entry(f"model.{stack}.norm.weight", (f"{stack}/final_norm/scale",), less=1.0)
    if not c.logits_via_embedding:
        yield linear("lm_head.out_proj", "logits_dense")


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    window = window_of(c)
    fits = lambda kind: kind.window in (None, window) and kind.encoder_window == (kind.window and (kind.window,) * 2)
    is_t5gemma = (
        c.architecture == "encoder_decoder"
        and has_blocks(c)
        and has_blocks(c.encoder_shape)
        and not (c.share_embeddings or c.share_stacks or c.merged_attention or c.qk_norm)
        and all(fits(kind) and kind.rotary and kind.rotary_theta is None for kind in c.kinds)
    )
    if not is_t5gemma:
        return None
    rope = {"rope_theta": c.rotary_theta, **scaling_to_hf(c.rotary_scaling)}
    stack = lambda shape, num_layers: stack_to_hf(shape, num_layers, _MAX_LENGTH) | {"rope_parameters": rope}
    return {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.logits_via_embedding,
        "encoder": stack(c.encoder_shape, c.num_encoder_layers),
        "decoder": stack(c, c.num_decoder_layers),
    }


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    encoder, decoder = ({**_SHARED, **_DEFAULTS, **(config.get(stack) or {})} for stack in ("encoder", "decoder"))
    for stack in (encoder, decoder):
        check_gemma(stack)
    shorter, longer = sorted((_kinds(encoder), _kinds(decoder)), key=len)
    differing = [name for name in _SHARED if encoder[name] != decoder[name]]
    differing += ["layer_types"] if shorter != longer[: len(shorter)] else []
    differing += ["rope_parameters"] if rotations(encoder) != rotations(decoder) else []
    if differing:
        raise UserError(
            f"config.json has other values of {', '.join(differing)} in the encoder than in the decoder. t5x_lab reads T5Gemma "
            "with the same ones."
        )
    theta, scaling = rotations(decoder)
    different = {field: encoder[name] for name, field in _SIZES.items() if encoder[name] != decoder[name]}
    scalars = {name: scalar_of(stack) for name, stack in (("encoder", encoder), ("decoder", decoder))}
    if scalars["encoder"] != scalars["decoder"] or "head_dim" in different:
        different["query_pre_attn_scalar"] = scalars["encoder"] or float(encoder["head_dim"])
    return TransformerConfig(
        architecture="encoder_decoder",
        vocab_size=decoder["vocab_size"],
        **{field: decoder[name] for name, field in _SIZES.items()},
        num_encoder_layers=encoder.get("num_hidden_layers", 26),
        num_decoder_layers=decoder.get("num_hidden_layers", 26),
        encoder=EncoderShape(**different) if different else None,
        share_embeddings=False,
        **BLOCKS,
        logits_via_embedding=config.get("tie_word_embeddings", True),
        rotary_theta=theta,
        rotary_scaling=scaling,
        max_positions=decoder["max_position_embeddings"],
        layer_pattern=shortest_pattern(longer),
        query_pre_attn_scalar=scalars["decoder"],
        attention_logit_cap=decoder["attn_logit_softcapping"],
        logit_cap=decoder.get("final_logit_softcapping", 30.0),
        longest_sequence=longest_without_scaling(decoder),
        norm_epsilon=decoder["rms_norm_eps"],
    )


def _kinds(stack: Mapping[str, Any]) -> list[LayerKind]:
    window = stack["sliding_window"]
    local = LayerKind(window=window, encoder_window=(window, window))
    types = read_layer_types({"num_hidden_layers": 26, **stack}, [SLIDING, FULL])
    return [local if kind == SLIDING else LayerKind() for kind in types]


def scalar_of(stack: Mapping[str, Any]) -> float | None:
    scalar = stack.get("query_pre_attn_scalar", 256)
    return None if scalar == stack["head_dim"] else float(scalar)


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, lambda name: name)
