"""Llama: causal decoders with rotary positions, RMS norms and a gated SiLU."""

from collections.abc import Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.formats.huggingface.table import DECODER_TOKENS, Entry, Family, linear
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import TransformerConfig


def _entries(c: TransformerConfig) -> Iterator[Entry]:
    yield Entry("model.embed_tokens.weight", ("token_embedder/embedding",))
    for i in range(c.num_decoder_layers):
        theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
        yield Entry(f"{theirs}.input_layernorm.weight", (f"{ours}/self_attention_norm/scale",))
        for letter, which in (("q", "query"), ("k", "key"), ("v", "value")):
            yield linear(f"{theirs}.self_attn.{letter}_proj", f"{ours}/self_attention/{which}")
        yield linear(f"{theirs}.self_attn.o_proj", f"{ours}/self_attention/out", inputs=2)
        yield Entry(f"{theirs}.post_attention_layernorm.weight", (f"{ours}/mlp_norm/scale",))
        for name, which in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            yield linear(f"{theirs}.mlp.{name}_proj", f"{ours}/mlp/{which}")
    yield Entry("model.norm.weight", ("decoder/final_norm/scale",))
    if not c.logits_via_embedding:
        yield linear("lm_head", "logits_dense")


def _to_theirs(c: TransformerConfig) -> dict[str, Any] | None:
    is_llama = (
        (c.architecture, c.positions, c.norm, c.norm_position, c.scaling)
        == ("causal_decoder", "rotary", "rms", "pre", "standard")
        and c.mlp_activations in (("silu", "linear"), ("swish", "linear"))
        and not c.use_bias
        and c.emb_dim % c.num_heads == 0
    )
    if not is_llama:
        return None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.emb_dim,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_decoder_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 2048,  # a hint for serving; rotations know no end
        "tie_word_embeddings": c.logits_via_embedding,
        "attention_bias": False,
        "mlp_bias": False,
        **DECODER_TOKENS,
    }  # fmt: skip


def _to_ours(config: Mapping[str, Any]) -> TransformerConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or theta != 10000.0 or config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError(
            f'config.json has rotations of type "{kind}" and base {theta:g}, or biases; of Llama\'s kind t5x_lab reads models '
            "with plain rotations of base 10,000 and without biases."
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
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


FAMILY = Family(_entries, _to_theirs, _to_ours, lambda name: name)
