"""Defaults of transformers' configuration classes, for settings that a config.json leaves out."""

from collections.abc import Mapping
from typing import Any

from t5x_lab.config.errors import UserError

_MAX_LAYERS = 10_000
_LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 2048, "rope_theta": 10_000.0,
    "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_LLAMA, "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "sliding_window": 4096,
    "max_window_layers": 28, "max_position_embeddings": 32_768,
}  # fmt: skip
_GEMMA_2: dict[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "rope_theta": 10_000.0,
}  # fmt: skip
_GEMMA_3: dict[str, Any] = {
    **_GEMMA_2, "vocab_size": 262_208, "max_position_embeddings": 131_072, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None, "num_heads": 8,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "tie_word_embeddings": True,
}  # fmt: skip
_MT5 = {**_T5, "vocab_size": 250_112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _MT5,
    "umt5": _MT5,
    "longt5": {**_T5, "encoder_attention_type": "local", "local_radius": 127, "global_block_size": 16},
    "openai-gpt": {
        "vocab_size": 40_478, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 512, "afn": "gelu",
        "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
    },
    "llama": {**_LLAMA, "vocab_size": 32_000},
    "mistral": {
        **_LLAMA, "vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {
        **_LLAMA, "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
    },
    "olmo2": {**_LLAMA, "vocab_size": 50_304, "rms_norm_eps": 1e-5},
    "gemma2": _GEMMA_2,
    "gemma3_text": _GEMMA_3,
    "t5gemma": _GEMMA_2,  # of each stack, as in the next one
    "t5gemma2": _GEMMA_3,
}  # fmt: skip


def with_defaults(config: Mapping[str, Any] | None, model_type: str) -> dict[str, Any]:
    """Returns the settings of a model, or of one of its stacks, with the defaults of its class.

    Raises:
      UserError: if it has no layers, or more than 10,000.
    """
    defaults = _DEFAULTS[model_type]
    settings = {**defaults, **(config or {})}
    for name in {"num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"} & defaults.keys():
        number, least = settings[name], 0 if name == "num_decoder_layers" else 1  # 0 = as many as num_layers
        if number is not None and not least <= number <= _MAX_LAYERS:
            raise UserError(
                f"config.json has {name} {number:,}. It must be from 1 to {_MAX_LAYERS:,}. Do not trust this model."
            )
    return settings
