"""Uses of resident experts that no message told of: counted whenever somebody asks, told to the policy at requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from tierd.arena.session_block import NewUse
from tierd.broker.interfaces import Catalogue, SessionMemory
from tierd.policy.policy import EvictionPolicy
from tierd.requests import BrokerStats, Phase

__all__ = ["NoSessionMemory", "UnaskedUses"]

# A node that ran for long without a miss has a lot to tell; the policy hears so many uses of it at a time.
_MOST_TOLD = 20_000


class NoSessionMemory:
    """For sessions that read nothing without asking."""

    def counts(self) -> Iterable[tuple[int, int, int]]:
        """None."""
        return ()

    def new_uses(self, asking: int | None) -> Iterable[tuple[int, list[NewUse]]]:
        """None."""
        del asking
        return ()

    def in_use(self, flat: int) -> bool:
        """No."""
        del flat
        return False

    def expectation(self, session_id: int) -> NDArray[np.uint8] | None:
        """None."""
        del session_id
        return None


class UnaskedUses:
    """Brings what sessions did without a message to the broker's counts and to its policy.

    The policy hears of uses at requests only, so that the moments at which somebody looks at the counts change
    nothing, and a replayed trace that tells it at the same points decides the same.

    Args:
        memory: where the sessions write.
        stats: the broker's counts.
        policy: the broker's policy.
        catalogue: knows the layer of a flat number.

    Attributes:
        used: told of every use of an open session as well: session, step, flat numbers.
    """

    def __init__(
        self,
        memory: SessionMemory,
        stats: BrokerStats,
        policy: EvictionPolicy,
        catalogue: Catalogue,
    ) -> None:
        self.used: Callable[[int, int, list[int]], object] = lambda _session, _step, _flats: None
        self._memory = memory
        self._stats = stats
        self._policy = policy
        self._catalogue = catalogue
        self._layers: dict[int, int] = {}
        self._told: dict[int, set[int]] = {}
        self._sums: dict[int, int] = {}

    def begin(self, session_id: int) -> None:
        """A session begins."""
        self._told[session_id] = set()
        self._sums[session_id] = 0

    def end(self, session_id: int) -> None:
        """It ended; what it still counts goes to the sums of all."""
        self._told.pop(session_id, None)
        self._sums.pop(session_id, None)

    def count(self) -> None:
        """Bring the counts up to date."""
        for session_id, *uses in self._memory.counts():
            for phase, new in zip((Phase.PREFILL, Phase.DECODE), uses, strict=True):
                counts = self._stats.phases[phase]
                counts.requests += new
                counts.hits += new
                self._stats.unasked += new
            if session_id in self._sums:
                self._sums[session_id] += sum(uses)

    def of(self, session_id: int) -> int:
        """Uses that an open session has counted."""
        return self._sums.get(session_id, 0)

    def tell(self, present: Callable[[int], bool], asking: int | None = None) -> None:
        """Tell the policy what sessions used since the last time, one after the other, each in its order.

        Args:
            present: whether the policy knows an expert; uses of one that has left meanwhile are not told.
            asking: the session that asks for something just now: what it used is told in any case. None: all is.
        """
        for session_id, new in self._memory.new_uses(asking):
            told = self._told.get(session_id)
            most = max(1, _MOST_TOLD // max(1, len(new)))
            place: tuple[int, int, bool] | None = None
            together: list[int] = []
            for flat, step, prefill, decode in new:
                uses = min(prefill + decode, most)
                if told and flat in told:
                    told.discard(flat)
                    uses -= 1
                if not uses or not present(flat):
                    continue
                here = (step, self._layer(flat), prefill > decode)
                if place is not None and place != here:
                    self._tell(session_id, place, together)
                    together = []
                place = here
                together.extend([flat] * uses)
            if place is not None:
                self._tell(session_id, place, together)
            if told is None:
                self._policy.ended(session_id)

    def _tell(self, session_id: int, place: tuple[int, int, bool], flats: list[int]) -> None:
        step, layer, prefill = place
        if session_id in self._told:
            self.used(session_id, step, flats)
        self._policy.visit(session_id, step, layer, prefill=prefill)
        self._policy.used_many(flats)

    def told(self, session_id: int, flats: Collection[int]) -> None:
        """A request of the session tells of these uses itself, before they are counted."""
        self._told[session_id] = set(flats)

    def in_use(self, flat: int) -> bool:
        """See `SessionMemory.in_use`."""
        return self._memory.in_use(flat)

    def expectation(self, session_id: int) -> NDArray[np.uint8] | None:
        """See `SessionMemory.expectation`."""
        return self._memory.expectation(session_id)

    def _layer(self, flat: int) -> int:
        layer = self._layers.get(flat)
        if layer is None:
            layer = self._layers[flat] = self._catalogue.record(flat).layer
        return layer
