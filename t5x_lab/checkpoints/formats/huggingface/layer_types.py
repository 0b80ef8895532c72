"""Kinds of layers in config.json: `layer_types` and the windows of "sliding_attention"."""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import TransformerShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.transformer import TransformerConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Returns the shortest pattern that repeats over these layers; () if all are plain."""
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    pattern = tuple(kinds[:length])
    return () if pattern == (LayerKind(),) else pattern


def layer_types(c: TransformerShape, num_layers: int) -> list[str]:
    return [SLIDING if c.kinds[kind].window else FULL for kind in c.kinds_of_layers(num_layers)]


def local_window(c: TransformerShape) -> int | None:
    """Returns the window of the local layers; None if there are none."""
    return next((kind.window for kind in c.kinds if kind.window), None)


def has_plain_windows(c: TransformerConfig) -> bool:
    """Returns whether local layers have the same window, and all have the same rotations and no windows of an encoder."""
    is_plain = lambda kind: kind.encoder_window is None and kind.rotary_theta is None
    return all(is_plain(kind) and kind.window in (None, local_window(c)) for kind in c.kinds)


def read_layer_types(config: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Returns the type of each layer.

    Args:
      config: settings with `num_hidden_layers`, and with `sliding_window` if layers have windows.
      default: types if config.json has no `layer_types`.

    Raises:
      UserError: for other types, another number of types than layers, or windows without a size.
    """
    num_layers = config["num_hidden_layers"]
    types = config.get("layer_types") or default
    unknown = [name for name in types if name not in (FULL, SLIDING)]
    if unknown or len(types) != num_layers:
        raise UserError(
            f"config.json has layer_types of {len(types)} layers, {', '.join(map(str, dict.fromkeys(types)))}, and "
            f'num_hidden_layers {num_layers}. t5x_lab reads "{FULL}" and "{SLIDING}", one for each layer.'
        )
    if SLIDING in types and not config["sliding_window"]:
        raise UserError(f'config.json has layers of type "{SLIDING}" without a size of their window. Set sliding_window in it.')
    return list(types)
