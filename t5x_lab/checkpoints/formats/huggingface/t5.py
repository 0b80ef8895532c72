"""T5, mT5, umT5 and LongT5: encoder-decoders with relative biases.

Those of umT5 are each layer's own. LongT5's encoder has local or transient-global attention.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.class_defaults import with_defaults
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.transformer import TransformerConfig


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("shared.weight", ("token_embedder/embedding",))
    stacks = (
        ("encoder", c.num_encoder_layers, ("SelfAttention",)),
        ("decoder", c.num_decoder_layers, ("SelfAttention", "EncDecAttention")),
    )
    for stack, num_layers, attentions in stacks:
        kind = _ENCODER_ATTENTION[_encoder_attention(c)] if stack == "encoder" else ""
        bias = f".layer.0.{kind}SelfAttention.relative_attention_bias.weight"
        if c.relative_bias == "shared":
            yield Entry(f"{stack}.block.0{bias}", (f"{stack}/relpos_bias/rel_embedding",), transposed=True)
        if kind == "TransientGlobal":
            source = f"{stack}.block.0.layer.0.{kind}SelfAttention.global_relative_attention_bias.weight"
            yield Entry(source, (f"{stack}/global_relpos_bias/rel_embedding",), transposed=True)
        for i in range(num_layers):
            source, target = f"{stack}.block.{i}", f"{stack}/layers_{i}"
            if c.relative_bias == "per_layer":
                yield Entry(f"{source}{bias}", (f"{target}/relpos_bias/rel_embedding",), transposed=True)
            if kind == "TransientGlobal":
                global_norm = f"{source}.layer.0.{kind}SelfAttention.global_input_layer_norm.weight"
                yield Entry(global_norm, (f"{target}/global_norm/scale",))
            for number, name in enumerate(attentions):
                attention, norm = {
                    "SelfAttention": ("self_attention", "self_attention_norm"),
                    "EncDecAttention": ("cross_attention", "cross_attention_norm"),
                }[name]
                yield Entry(f"{source}.layer.{number}.layer_norm.weight", (f"{target}/{norm}/scale",))
                for letter, projection in (("q", "query"), ("k", "key"), ("v", "value")):
                    yield linear(f"{source}.layer.{number}.{kind}{name}.{letter}", f"{target}/{attention}/{projection}")
                yield linear(f"{source}.layer.{number}.{kind}{name}.o", f"{target}/{attention}/out", inputs=2)
            number = len(attentions)
            yield Entry(f"{source}.layer.{number}.layer_norm.weight", (f"{target}/mlp_norm/scale",))
            for name in ("wi",) if len(c.mlp_activations) == 1 else ("wi_0", "wi_1"):
                yield linear(f"{source}.layer.{number}.DenseReluDense.{name}", f"{target}/mlp/{name}")
            yield linear(f"{source}.layer.{number}.DenseReluDense.wo", f"{target}/mlp/wo")
        yield Entry(f"{stack}.final_layer_norm.weight", (f"{stack}/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


# Prefixes of the names of attention layers, by `encoder_attention_type`.
_ENCODER_ATTENTION = {"full": "", "local": "Local", "transient-global": "TransientGlobal"}


def _encoder_attention(c: TransformerConfig) -> str:
    if _local_radius(c) is None:
        return "full"
    return "local" if c.global_block_size is None else "transient-global"


def _local_radius(c: TransformerConfig) -> int | None:
    """Returns the positions on each side that LongT5's encoder attends to; None for another network."""
    window = c.layer_pattern[0].encoder_window if len(c.layer_pattern) == 1 else None
    is_local = window is not None and c.layer_pattern == (LayerKind(encoder_window=(window[0], window[0])),)
    return window[0] if window is not None and is_local else None


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    activation = _activation(c.mlp_activations)
    is_t5 = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling) == ("encoder_decoder", "relative", "rms", "pre", "t5")
        and activation
        and c.kv_heads == c.num_heads
        and not (c.use_bias or c.share_stacks or c.qk_norm or c.encoder or c.merged_attention)
        and (not c.layer_pattern or (_local_radius(c) is not None and c.relative_bias == "shared"))
        and (c.global_block_size is None or _local_radius(c) is not None)
        and not c.scale_attn_logits
        and c.share_embeddings
    )
    if not is_t5:
        return None
    radius = _local_radius(c)
    kind = "LongT5" if radius is not None else "UMT5" if c.relative_bias == "per_layer" else "T5"
    local = {} if radius is None else {"encoder_attention_type": _encoder_attention(c), "local_radius": radius}
    if c.global_block_size is not None:
        local["global_block_size"] = c.global_block_size
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": kind.lower(),
        **local,
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
        "tie_word_embeddings": c.logits_via_embedding,  # transformers uses it for tied and scaled logits
        "dropout_rate": c.dropout_rate,
        "is_encoder_decoder": True,
    }


_GATED = {"gated-gelu": "gelu", "gated-gelu_new": "gelu", "gated-silu": "silu", "gated-relu": "relu"}
_PLAIN = {"relu": "relu", "silu": "silu", "tanh": "tanh", "gelu_new": "gelu"}


def _activation(activations: tuple) -> str | None:
    if len(activations) == 2 and activations[1] == "linear":
        return next((hf_name for hf_name, name in _GATED.items() if name == activations[0]), None)
    return next((hf_name for hf_name, name in _PLAIN.items() if (name,) == activations), None)


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    config = with_defaults(config, config["model_type"])
    activation = config["feed_forward_proj"]
    if activation not in _GATED and activation not in _PLAIN:
        raise UserError(
            f'config.json has feed_forward_proj "{activation}", which t5x_lab does not support. Supported: '
            f"{', '.join((*_GATED, *_PLAIN))}."
        )
    pattern: tuple[LayerKind, ...] = ()
    is_global = False
    if config["model_type"] == "longt5":
        attention = config["encoder_attention_type"]
        if attention not in ("local", "transient-global"):
            raise UserError(
                f'config.json has encoder_attention_type "{attention}", which t5x_lab does not support. Supported: "local", '
                '"transient-global".'
            )
        is_global = attention == "transient-global"
        pattern = (LayerKind(encoder_window=(config["local_radius"], config["local_radius"])),)
    return TransformerConfig(
        architecture="encoder_decoder",
        layer_pattern=pattern,
        global_block_size=config["global_block_size"] if is_global else None,
        vocab_size=config["vocab_size"],
        emb_dim=config["d_model"],
        num_heads=config["num_heads"],
        head_dim=config["d_kv"],
        mlp_dim=config["d_ff"],
        num_encoder_layers=config["num_layers"],
        num_decoder_layers=config["num_decoder_layers"] or config["num_layers"],
        mlp_activations=(_GATED[activation], "linear") if activation in _GATED else (_PLAIN[activation],),
        logits_via_embedding=_is_tied(config),
        relpos_buckets=config["relative_attention_num_buckets"],
        relpos_max_distance=config["relative_attention_max_distance"],
        relative_bias="per_layer" if config["model_type"] == "umt5" else "shared",
        norm_epsilon=config["layer_norm_epsilon"],
    )


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Returns whether logits are tied and scaled, as in T5 1.0.

    transformers 5 ties all T5 models, and marks scaling separately.
    """
    return config["model_type"] in ("t5", "umt5", "longt5") and bool(
        config.get("scale_decoder_outputs", config["tie_word_embeddings"])
    )


def _canonical_name(name: str) -> str:
    return "shared.weight" if name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight") else name


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, _canonical_name)
