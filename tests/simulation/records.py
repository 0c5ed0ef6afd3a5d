"""A small imaginary store: every expert's bytes follow from its number, so a wrong byte shows."""

from __future__ import annotations

from hashlib import blake2b

from tierd.devices.device import RecordRead
from tierd.errors import LimitExceeded
from tierd.store.checksums import xxh3

__all__ = ["RECORD_BYTES", "VirtualStore"]

RECORD_BYTES = 32
"""Real records are megabytes; what is tested here does not depend on it."""


class VirtualStore:
    """Layers of experts, dealt out to shards: the broker's catalogue, and the bytes that a sound drive holds."""

    def __init__(self, layers: int, experts_per_layer: int, shards: int = 1) -> None:
        self.layers = layers
        self.shards = shards
        self.experts_per_layer = experts_per_layer
        self.content = [
            blake2b(flat.to_bytes(8, "little"), digest_size=RECORD_BYTES).digest() for flat in range(len(self))
        ]
        self._records = [
            RecordRead(
                expert=flat,
                layer=flat // experts_per_layer,
                index=flat % experts_per_layer,
                shard=flat % shards,
                offset=flat // shards * RECORD_BYTES,
                nbytes=RECORD_BYTES,
                xxh3=xxh3(content),
            )
            for flat, content in enumerate(self.content)
        ]

    def __len__(self) -> int:
        return self.layers * self.experts_per_layer

    def flat(self, layer: int, expert: int) -> int:
        """Flat number of an expert; LimitExceeded for a layer or expert that the store does not have."""
        if not (0 <= layer < self.layers and 0 <= expert < self.experts_per_layer):
            raise LimitExceeded(f"the store has no expert {expert} in layer {layer}")
        return layer * self.experts_per_layer + expert

    def record(self, flat: int) -> RecordRead:
        """Where the record of a flat expert number lies."""
        return self._records[flat]
