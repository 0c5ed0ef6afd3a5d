"""YaRN: rotary frequencies for contexts longer than a model was first trained for.

Source: Peng et al. 2023, arXiv:2309.00071, in the form that published configs name with `rope_type` "yarn": slow
wavelengths are divided by `factor`, fast ones stay, a linear ramp lies between. Computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Yarn", "magnitude"]


def magnitude(factor: float, weight: float = 1.0) -> float:
    """What scores are multiplied by when a context grows by `factor`: 1 + 0.1 weight ln(factor), 1 if it does not."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """The settings of a `yarn` rope.

    Attributes:
        factor: how many times longer the context became.
        original_positions: the context before (`original_max_position_embeddings`).
        beta_fast: wavelengths with more turns than this in the original context stay as they are.
        beta_slow: wavelengths with fewer are divided by `factor`.
        truncate: the borders of the ramp are widened to whole dimensions.
        attention_factor: cosines and sines are multiplied by it.
        all_dim_weight: `mscale_all_dim`, 0 where it is absent; families with a latent cache scale their scores by it.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    all_dim_weight: float = 0.0

    def frequencies(self, rotary_dim: int, theta: float) -> NDArray[np.float64]:
        """Radians per position of each pair, float64 [rotary_dim / 2]."""
        plain = np.float64(theta) ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        low, high = (self._border(turns, rotary_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
        return plain * (1.0 - ramp) + plain / self.factor * ramp

    def _border(self, turns: float, rotary_dim: int, theta: float) -> float:
        """The pair, not whole, whose wavelength fits `turns` times into the original context."""
        return rotary_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
