"""The store in the broker's words: flat numbers and where their records lie."""

from __future__ import annotations

from tierd.devices.device import RecordRead
from tierd.store.store import ExpertStore

__all__ = ["StoreCatalogue"]


class StoreCatalogue:
    """Looks up the index of an open store, and remembers what was looked up: some 200 bytes for each expert used."""

    def __init__(self, store: ExpertStore) -> None:
        self._geometry = store.geometry
        self._index = store.index
        self._ranges = {
            entry.layer: (store.geometry.layer_start(entry.layer), entry.experts) for entry in store.geometry.layers
        }
        self._records: dict[int, RecordRead] = {}

    def flat(self, layer: int, expert: int) -> int:
        """Flat number of an expert; LimitExceeded for a layer or expert that the store does not have."""
        start, experts = self._ranges.get(layer, (0, 0))
        return start + expert if 0 <= expert < experts else self._geometry.flat(layer, expert)

    def record(self, flat: int) -> RecordRead:
        """Where the record of a flat expert number lies."""
        read = self._records.get(flat)
        if read is None:
            # As one tuple of plain numbers, in the order of `INDEX_DTYPE`: field by field takes ten times as long.
            layer, expert, shard, offset, nbytes, xxh3 = self._index[flat].item()
            read = self._records[flat] = RecordRead(flat, layer, expert, shard, offset, nbytes, xxh3)
        return read
