"""GPT-1: causal decoders with learned positions, post-norm and biases."""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.class_defaults import with_defaults
from t5x_lab.checkpoints.formats.huggingface.table import Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.transformer import TransformerConfig


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("transformer.tokens_embed.weight", ("token_embedder/embedding",))
    yield Entry("transformer.positions_embed.weight", ("position_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        source, target = f"transformer.h.{i}", f"decoder/layers_{i}"
        sublayers = (
            ("attn.c_attn", ("self_attention/query", "self_attention/key", "self_attention/value"), 1),
            ("attn.c_proj", ("self_attention/out",), 2),
            ("mlp.c_fc", ("mlp/wi",), 1),
            ("mlp.c_proj", ("mlp/wo",), 1),
        )
        for name, parts, inputs in sublayers:  # Conv1D has inputs first
            yield Entry(f"{source}.{name}.weight", tuple(f"{target}/{part}/kernel" for part in parts), inputs)
            yield Entry(f"{source}.{name}.bias", tuple(f"{target}/{part}/bias" for part in parts), inputs=0)
        for name, norm in (("ln_1", "self_attention_norm"), ("ln_2", "mlp_norm")):
            yield Entry(f"{source}.{name}.weight", (f"{target}/{norm}/scale",))
            yield Entry(f"{source}.{name}.bias", (f"{target}/{norm}/bias",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _to_hf_config(c: TransformerConfig) -> dict[str, Any] | None:
    is_gpt = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "learned", "layer", "post", "standard")
        and c.mlp_activations == ("gelu",)
        and c.use_bias is True
        and not (c.qk_norm or c.layer_pattern)
        and (c.kv_heads, c.num_heads * c.head_dim, c.mlp_dim) == (c.num_heads, c.emb_dim, 4 * c.emb_dim)
    )
    if not is_gpt:
        return None
    return {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "vocab_size": c.vocab_size,
        "n_embd": c.emb_dim,
        "n_head": c.num_heads,
        "n_layer": c.num_decoder_layers,
        "n_positions": c.max_positions,
        "afn": "gelu",
        "layer_norm_epsilon": c.norm_epsilon,
        "tie_word_embeddings": c.logits_via_embedding,
        **{name: c.dropout_rate for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
    }  # fmt: skip


def _from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    config = with_defaults(config, "openai-gpt")
    if config["afn"] != "gelu":
        raise UserError(f'config.json has afn "{config["afn"]}". For GPT-1 t5x_lab supports "gelu" only.')
    return TransformerConfig(
        architecture="causal_decoder",
        vocab_size=config["vocab_size"],
        emb_dim=config["n_embd"],
        num_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        mlp_dim=4 * config["n_embd"],
        num_decoder_layers=config["n_layer"],
        mlp_activations=("gelu",),
        logits_via_embedding=config["tie_word_embeddings"],
        scaling="standard",
        positions="learned",
        max_positions=config["n_positions"],
        norm="layer",
        norm_position="post",
        norm_epsilon=config["layer_norm_epsilon"],
        use_bias=True,
    )


def _canonical_name(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


FAMILY = Family(_entries, _to_hf_config, _from_hf_config, _canonical_name)
