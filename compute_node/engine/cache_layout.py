"""What a model keeps of its tokens: rows of float32 per token, and recurrent states per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from compute_node.kernels.pages import PAGE
from compute_node.models.decoder_config import DecoderConfig

__all__ = ["CacheLayout", "Plane", "grouped_query_layout"]


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of rows: for each token `heads` times `width` float32.

    Attributes:
        heads: such as key/value heads.
        width: of a head's row.
    """

    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a family keeps.

    Attributes:
        planes: by name, such as "layer 3 keys"; rows of every token.
        states: by name, the shape of a float32 state of every sequence, such as "layer 3 delta".
    """

    planes: Mapping[str, Plane]
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def recurrent(self) -> bool:
        """Whether a sequence is more than the rows of its tokens: it can then only be continued where it ended."""
        return bool(self.states)

    @property
    def page_bytes(self) -> int:
        """Bytes of the rows of one page."""
        return 4 * PAGE * sum(plane.heads * plane.width for plane in self.planes.values())

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the states of one sequence: two copies, one that is read in a step and one that is written."""
        return 2 * 4 * sum(math.prod(shape) for shape in self.states.values())


def grouped_query_layout(config: DecoderConfig) -> CacheLayout:
    """Keys and values of each layer's key/value heads."""
    plane = Plane(config.kv_heads, config.head_dim)
    return CacheLayout(
        {f"layer {layer} {kind}": plane for layer in range(config.layers) for kind in ("keys", "values")}
    )
