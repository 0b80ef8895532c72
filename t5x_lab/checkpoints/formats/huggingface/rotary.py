"""Rotary positions in config.json, of any version of transformers."""

import math
from collections.abc import Mapping
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.networks.rotary import RotaryScaling

MAX_LENGTH = 2048  # only a hint for serving


def scaling_to_hf(scaling: RotaryScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_slow": scaling.low_freq_factor,
            "beta_fast": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
        }
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _scaling_from_hf(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> RotaryScaling | None:
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return RotaryScaling(factor=float(rope["factor"]), kind="linear")
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        factor = float(rope.get("factor") or config["max_position_embeddings"] / length)
        return RotaryScaling(
            factor=factor,
            kind="yarn",
            low_freq_factor=float(rope.get("beta_slow") or 1),
            high_freq_factor=float(rope.get("beta_fast") or 32),
            original_length=length,
            attention_factor=_attention_factor(rope, factor),
        )
    return RotaryScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_length=rope["original_max_position_embeddings"],
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Returns the factor of queries and keys that YaRN's settings give (Peng et al. 2023, equation 22)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns type and settings of rotary positions from a config.json of any version of `transformers`."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type", "default")), rope


def rotations(config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Returns base and scaling of rotary positions.

    The type "dynamic" changes nothing up to the length of the original training, see `longest_without_scaling`.
    """
    kind, rope = _rope(config)
    is_partial = rope.get("partial_rotary_factor", 1.0) != 1.0 or not rope.get("truncate", True)
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn") or is_partial:
        raise UserError(
            f'config.json has rotary positions of type "{kind}", or of a part of each head. t5x_lab supports the types '
            '"default", "linear", "dynamic", "llama3" and "yarn" of whole heads, without truncate = false.'
        )
    return float(rope.get("rope_theta", config["rope_theta"])), _scaling_from_hf(kind, rope, config)


def longest_without_scaling(config: Mapping[str, Any]) -> int | None:
    """Returns the longest sequence that a network without dynamic scaling reads as the model does. None = any."""
    return config["max_position_embeddings"] if _rope(config)[0] == "dynamic" else None
