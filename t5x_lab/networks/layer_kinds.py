"""`LayerKind`: what differs between layers of one stack, which have parameters of the same shapes."""

import dataclasses

import numpy as np

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.networks.rotary import RotaryScaling, angular_rates
from t5x_lab.ops.masks import Window


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A kind of layers in `TransformerConfig.layer_pattern`: its window and its rotary positions.

    Attributes:
      window: number of positions that a query of causal attention sees, itself included (Beltagy et al. 2020). Queries that
        see both directions, of an encoder or a prefix, see as many on each side. None = all positions.
      encoder_window: positions to the left and to the right that a query of an encoder sees, such as (512, 512), in place of
        `window`.
      rotary: whether queries and keys are rotated, for rotary positions (False is NoPE, Kazemnejad et al. 2023).
      rotary_theta, rotary_scaling: base of the wavelengths, and an optional `RotaryScaling`. With rotary_theta = None those of
        `TransformerConfig`.
    """

    window: int | None = None
    encoder_window: tuple[int, int] | None = None
    rotary: bool = True
    rotary_theta: float | None = None
    rotary_scaling: RotaryScaling | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, "window", "rotary_theta")
        if self.encoder_window is not None:
            object.__setattr__(self, "encoder_window", tuple(self.encoder_window))
            if len(self.encoder_window) != 2 or min(self.encoder_window) < 0:
                raise UserError(
                    f"LayerKind.encoder_window is {self.encoder_window}. It must be the numbers of positions to the left and "
                    "to the right, such as (512, 512)."
                )
        if self.rotary_scaling is not None and self.rotary_theta is None:
            raise UserError(
                "LayerKind.rotary_scaling is set, but rotary_theta is None, with which the kind has the rotary positions of "
                "TransformerConfig. Set LayerKind.rotary_theta too."
            )

        if not self.rotary and self.rotary_theta is not None:
            raise UserError(
                "LayerKind.rotary_theta is set, but rotary = False leaves out rotary positions. Remove one of the two."
            )

    def mask_window(self, causal: bool) -> Window | None:
        """Returns the window of a decoder (causal) or of an encoder."""
        if not causal and self.encoder_window is not None:
            return Window(*self.encoder_window)
        return None if self.window is None else Window(self.window - 1, self.window - 1)

    def rotary_settings(self, theta: float, scaling: RotaryScaling | None) -> tuple[float, RotaryScaling | None]:
        """Returns base and scaling of rotary positions: those of the kind, or the given ones of `TransformerConfig`."""
        return (theta, scaling) if self.rotary_theta is None else (self.rotary_theta, self.rotary_scaling)

    def rotation(self, size: int, theta: float, scaling: RotaryScaling | None) -> tuple[np.ndarray, float]:
        """Returns the radians per position of each pair of dimensions, float64 [size / 2], and the factor of the result.

        Args:
          size: dimensions of a head.
          theta, scaling: those of `TransformerConfig`.
        """
        if not self.rotary:
            return np.zeros(size // 2), 1.0
        theta, scaling = self.rotary_settings(theta, scaling)
        return angular_rates(size, theta, scaling), scaling.attention_factor if scaling else 1.0
