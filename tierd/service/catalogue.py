"""The store in the broker's words: flat numbers and where their records lie."""

from __future__ import annotations

from tierd.devices.device import RecordRead
from tierd.store.store import ExpertStore

__all__ = ["StoreCatalogue"]


class StoreCatalogue:
    """Looks up the index of an open store; holds no copy of it."""

    def __init__(self, store: ExpertStore) -> None:
        self._geometry = store.geometry
        self._index = store.index

    def flat(self, layer: int, expert: int) -> int:
        """Flat number of an expert; LimitExceeded for a layer or expert that the store does not have."""
        return self._geometry.flat(layer, expert)

    def record(self, flat: int) -> RecordRead:
        """Where the record of a flat expert number lies."""
        # As one tuple of plain numbers, in the order of `INDEX_DTYPE`: field by field takes ten times as long.
        layer, expert, shard, offset, nbytes, xxh3 = self._index[flat].item()
        return RecordRead(flat, layer, expert, shard, offset, nbytes, xxh3)
