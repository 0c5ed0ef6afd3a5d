"""A store whose dense weights are random ones from memory: a token moves the bytes of a quantised model."""

from __future__ import annotations

from compute_node.bench.random_model import RandomModel
from tierd.store.manifest import Manifest
from tierd.store.store import DenseTensor, ExpertStore

__all__ = ["DenseView"]


class DenseView:
    """The store, but with dense weights of int8 from memory.

    Args:
        store: with the experts.
        dense: of the same config.
    """

    def __init__(self, store: ExpertStore, dense: RandomModel) -> None:
        self._store = store
        self._dense = dense

    @property
    def manifest(self) -> Manifest:
        """Of the experts, and of the dense tensors' names."""
        return self._store.manifest.model_copy(update={"dense": self._dense.manifest.dense})

    @property
    def fingerprint(self) -> str:
        """Of the store."""
        return self._store.fingerprint

    def read_file(self, name: str) -> bytes:
        """A text file of the store."""
        return self._store.read_file(name)

    def read_dense(self, name: str) -> DenseTensor:
        """Random, int8."""
        return self._dense.read_dense(name)
