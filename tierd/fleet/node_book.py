"""Which nodes can be asked now, and where: told by their actors, once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import ray

__all__ = ["NodeBook"]

_LOOK_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0
_LOST_SECONDS: Final = 2.0
"""A node that broke a connection off is not asked for so long, unless it has another address by then."""


class NodeBook:
    """One replica's view of the nodes.

    Args:
        names: of the nodes' actors.
        namespace: of the fleet.
    """

    def __init__(self, names: Sequence[str], namespace: str) -> None:
        self._namespace = namespace
        self._names = names
        self._actors: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._lost: dict[str, tuple[str, float]] = {}

    def serving(self) -> dict[str, str]:
        """HOST:PORT by name of the nodes that can be asked."""
        now = time.monotonic()
        return {
            name: address
            for name, address in self._addresses.items()
            if not (lost := self._lost.get(name)) or lost[0] != address or lost[1] <= now
        }

    def states(self) -> dict[str, str]:
        """By name of every node, whether it can be asked."""
        serving = self.serving()
        return {name: "serving" if name in serving else "away" for name in self._names}

    def lost(self, name: str, address: str) -> None:
        """A connection to the node broke off."""
        self._lost[name] = (address, time.monotonic() + _LOST_SECONDS)

    async def watch(self) -> None:
        """Keep asking."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Ask every node's actor once, all at the same time."""
        await asyncio.gather(*map(self._look_at, self._names))

    async def _look_at(self, name: str) -> None:
        try:
            if name not in self._actors:
                self._actors[name] = await asyncio.to_thread(ray.get_actor, name, namespace=self._namespace)
            report = await asyncio.wait_for(self._actors[name].report.remote(), _ANSWER_SECONDS)
        except TimeoutError:
            return  # a busy host; a connection will tell whether the node is there
        except (ValueError, ray.exceptions.RayError):
            self._actors.pop(name, None)
            self._addresses.pop(name, None)
            return
        if report["address"]:
            self._addresses[name] = report["address"]
        else:
            self._addresses.pop(name, None)
