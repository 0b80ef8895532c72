"""T5Gemma: encoder-decoders of Gemma 2's blocks, with embeddings of their own in both stacks, which may differ in size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.class_defaults import with_defaults
from t5x_lab.checkpoints.formats.huggingface.gemma import (
    SIZES,
    check_gemma,
    default_types,
    has_blocks,
    query_scalar,
    stack_from_hf,
    stack_to_hf,
)
from t5x_lab.checkpoints.formats.huggingface.layer_types import (
    SLIDING,
    local_window,
    read_layer_types,
)
from t5x_lab.checkpoints.formats.huggingface.llama import projections
from t5x_lab.checkpoints.formats.huggingface.rotary import rotations, scaling_to_hf
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import EncoderShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.transformer import TransformerConfig

_MAX_LENGTH = 8192  # only a hint for serving
_SUBLAYERS = {"self_attn": "self_attention", "cross_attn": "cross_attention", "feedforward": "mlp"}
# What the encoder and the decoder must have in common.
_SHARED = ("vocab_size", "attn_logit_softcapping", "rms_norm_eps", "sliding_window", "max_position_embeddings")


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
    window = local_window(c)
    fits = lambda kind: kind.window in (None, window) and kind.encoder_window == (kind.window and (kind.window,) * 2)
    is_t5gemma = (
        c.architecture == "encoder_decoder"
        and has_blocks(c)
        and has_blocks(c.encoder_shape)
        and not (c.share_embeddings or c.share_stacks or c.merged_attention or c.qk_norm or c.rotary_cross_attention)
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
    encoder, decoder = (with_defaults(config.get(stack), "t5gemma") for stack in ("encoder", "decoder"))
    kinds = shared_layers(encoder, decoder, _SHARED, rotations, lambda stack: default_types(stack, 2))
    different = {field: encoder[name] for name, field in SIZES.items() if encoder[name] != decoder[name]}
    if query_scalar(encoder) != query_scalar(decoder) or "head_dim" in different:
        different["query_pre_attn_scalar"] = float(encoder["query_pre_attn_scalar"])
    window = decoder["sliding_window"]
    local = LayerKind(window=window, encoder_window=(window, window)) if SLIDING in kinds else LayerKind()
    return TransformerConfig(
        architecture="encoder_decoder",
        **stack_from_hf(decoder, decoder, kinds, local),
        num_encoder_layers=encoder["num_hidden_layers"],
        encoder=EncoderShape(**different) if different else None,
        share_embeddings=False,
        logits_via_embedding=config.get("tie_word_embeddings", True),
    )


def shared_layers(
    encoder: Mapping[str, Any],
    decoder: Mapping[str, Any],
    settings: Iterable[str],
    rotary: Callable[[Mapping[str, Any]], Any],
    default: Callable[[Mapping[str, Any]], list[str]],
) -> list[str]:
    """Returns the types of the layers of the deeper stack, after a check that the two stacks have the same blocks.

    Args:
      encoder: settings of the encoder.
      decoder: settings of the decoder.
      settings: names of those that must be equal.
      rotary: function that returns the rotary positions of a stack, which must be equal.
      default: function that returns the types of the layers of a stack that does not list them.

    Raises:
      UserError: with the names of settings that differ.
    """
    shorter, longer = sorted((read_layer_types(stack, default(stack)) for stack in (encoder, decoder)), key=len)
    differing = [name for name in settings if encoder[name] != decoder[name]]
    differing += ["layer_types"] if shorter != longer[: len(shorter)] else []
    differing += ["rope_parameters"] if rotary(encoder) != rotary(decoder) else []
    if differing:
        raise UserError(
            f"config.json has other values of {', '.join(differing)} in the encoder than in the decoder. t5x_lab reads models "
            "with the same ones."
        )
    for stack in (encoder, decoder):
        check_gemma(stack)
    return longer


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, lambda name: name)
