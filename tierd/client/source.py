"""Where a compute node takes its experts from: one interface, whatever stands behind it.

`InProcess` reads the store itself, `ArenaSource` maps a daemon's arena, others fetch bytes from afar. The node cannot
tell them apart by its tokens, only by its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tierd.requests import Phase
from tierd.store.manifest import Manifest
from tierd.store.store import DenseTensor

__all__ = ["ExpertSource", "Phase", "SourceStats", "StoreView", "Use"]


Use = Callable[[int, int], None]
"""`use(expert, address)`: compute with the expert's record, readable at `address` until the call returns.

It may be called again for the same expert when bytes changed under use, so it must overwrite what it wrote before,
never add to it; and it must bear any bytes, since results of a torn read are thrown away.
"""


@dataclass(slots=True)
class SourceStats:
    """The node's own count, kept where its router's choices enter; never derived from the daemon's.

    Attributes:
        requested: unique experts asked for, summed over layers and steps.
        tiers: of these, how many each tier had when they were asked for (`ram`, a drive's tier, …).
        outcomes: of these, how many were a hit, a miss, or joined a running read.
        repeated: experts fetched again because bytes changed under use or the daemon restarted.
        wait_seconds: time in which the node had nothing to compute on because it waited for experts.
        wait_by_outcome: the same, split by the outcome of the expert that ended the wait.
        visits: calls of `visit`.
    """

    requested: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0, "joined": 0})
    repeated: int = 0
    wait_seconds: float = 0.0
    wait_by_outcome: dict[str, float] = field(default_factory=lambda: {"hit": 0.0, "miss": 0.0, "joined": 0.0})
    visits: int = 0


@runtime_checkable
class StoreView(Protocol):
    """What a node reads once at start: geometry, text files, dense weights. All of it verified."""

    @property
    def manifest(self) -> Manifest:
        """Geometry, formats, and what else the store says of itself."""

    @property
    def fingerprint(self) -> str:
        """64 hex digits over everything that decides a token."""

    def read_file(self, name: str) -> bytes:
        """A text file of the store (config.json, tokenizer.json, …); UsageError if the manifest does not list it."""

    def read_dense(self, name: str) -> DenseTensor:
        """A dense tensor under the checkpoint's own name; ChecksumMismatch if its bytes are not the converted ones."""


@runtime_checkable
class ExpertSource(Protocol):
    """Brings experts to the node's engine thread. Synchronous; one caller at a time."""

    stats: SourceStats

    @property
    def store(self) -> StoreView:
        """The store that the experts belong to."""

    def visit(self, layer: int, experts: Sequence[int], use: Use, *, step: int, phase: Phase) -> None:
        """Call `use` for every expert of `experts`, in order of arrival, and return when all uses are certain.

        Args:
            layer: model layer number.
            experts: distinct expert numbers, in the order in which the router ranked them; more than fit the arena
                are served in waves, each expert read once.
            use: see `Use`.
            step: decode step or prefill chunk, rising.
            phase: prefill or decode, for the counters.

        Raises:
            DataLoss: no good copy of an expert exists.
            DeadlineExceeded: an expert did not come in time.
            DaemonUnavailable: the daemon went away and did not come back within the bound.
            SessionRefused: a daemon came back that serves another store.
        """

    def close(self) -> None:
        """End the session and give back mappings, sockets and threads."""
