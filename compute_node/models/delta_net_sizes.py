"""Sizes of gated DeltaNet layers, and how a family's fused projections are sorted into their parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["DeltaNetSizes"]

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """Linear attention with a state of [key_width, value_width] per value head.

    Attributes:
        key_heads: heads of queries and keys (`linear_num_key_heads`).
        value_heads: heads of values (`linear_num_value_heads`), a multiple of `key_heads`.
        key_width: of a query or key (`linear_key_head_dim`).
        value_width: of a value (`linear_value_head_dim`).
        taps: of the causal convolution (`linear_conv_kernel_dim`).
        layers: which layers are such layers.
        fused: q, k, v and z are one projection, b and a another, both sorted by key heads.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    layers: frozenset[int]
    fused: bool

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Width of what is convolved: queries, keys, values."""
        return 2 * self.keys + self.values

    def states(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Recurrent states of a layer by name: shapes of one sequence's."""
        return {
            f"layer {layer} delta": (self.value_heads, self.key_width, self.value_width),
            f"layer {layer} convolution": (self.taps - 1, self.channels),
        }

    def fused_order(self) -> tuple[Order, Order]:
        """Rows of `in_proj_qkvz` that are queries, keys, values, and rows that are z.

        The fused projection has, for each key head: its query, its key, the values of its value heads, their z.
        """
        own = self.values // self.key_heads
        heads = np.arange(self.key_heads * (2 * self.key_width + 2 * own)).reshape(self.key_heads, -1)
        edges = np.cumsum([self.key_width, self.key_width, own])
        query, key, value, z = np.split(heads, edges, axis=1)
        return np.concatenate([query.ravel(), key.ravel(), value.ravel()]), z.ravel()

    def fused_rates_order(self) -> Order:
        """Rows of `in_proj_ba`, which has b and then a for each key head, as all b and then all a."""
        heads = np.arange(2 * self.value_heads).reshape(self.key_heads, 2, -1)
        return heads.transpose(1, 0, 2).ravel()
