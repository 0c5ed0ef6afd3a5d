"""How many far nodes a few stores carry: a simulation of queues, fed with what was measured on one node.

Every node computes a layer's dense part, asks a worker, waits, and goes on. On the store's host a request passes the
link's one end, for an expert that is not in RAM the daemon and the drive, one of the worker's cores, and the link's
other end. Each of these serves one request after the other; nodes choose hosts in turn, as their experts spread.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from random import Random
from typing import Any, Final

__all__ = ["FleetFacts", "StoreHost", "simulate_fleet"]

_LAYERS_OF_A_NODE: Final = 200
"""Requests of each node, of which the first quarter does not count."""
_MOST_REQUESTS: Final = 200_000


@dataclass(frozen=True, slots=True)
class StoreHost:
    """What a host with a store brings along.

    Attributes:
        bits_per_second: of its link, each way.
        cores: of its workers.
        drive_bytes_per_second: of its drives together.
    """

    bits_per_second: float
    cores: int
    drive_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What a layer of a token costs, measured or given.

    Attributes:
        layers: with routed experts, of a token.
        dense_seconds: of a layer on the node.
        core_seconds: of a layer's experts on a core of the worker.
        wire_seconds: there and back, whatever is sent.
        request_bytes: that a layer sends to the store.
        answer_bytes: that come back.
        missed_bytes: that a layer reads from the drive, on average.
        daemon_seconds: of the daemon's one core for what a layer misses, on average.
    """

    layers: int
    dense_seconds: float
    core_seconds: float
    wire_seconds: float
    request_bytes: float
    answer_bytes: float
    missed_bytes: float
    daemon_seconds: float = 0.0


class _Server:
    """Serves in order of arrival, one request at a time on each of its places."""

    def __init__(self, places: int = 1) -> None:
        self._free = [0.0] * places
        self._places = places
        self.busy = 0.0

    def serve(self, arrival: float, seconds: float) -> float:
        """When a request that arrives then and takes so long leaves."""
        begin = max(arrival, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + seconds)
        self.busy += seconds / self._places
        return begin + seconds


class _Host:
    def __init__(self, host: StoreHost) -> None:
        self.host = host
        self.parts = {
            "link in": _Server(),
            "daemon": _Server(),
            "drive": _Server(),
            "cores": _Server(host.cores),
            "link out": _Server(),
        }


def simulate_fleet(facts: FleetFacts, host: StoreHost, *, nodes: int, hosts: int, seed: int = 0) -> dict[str, Any]:
    """Let so many nodes decode on so many hosts.

    Args:
        facts: of a layer.
        host: each of the stores' hosts.
        nodes: that decode all the time.
        hosts: with the whole store each; nodes spread over them.
        seed: of the moments at which nodes begin.

    Returns:
        `tokens_per_second` of one node, `total_tokens_per_second`, `limit`: what is busiest, and `busy`: the share of
        the time by part of a host.
    """
    chance = Random(seed)  # noqa: S311 - no secret is drawn
    stores = [_Host(host) for _ in range(hosts)]
    each = max(8, min(_LAYERS_OF_A_NODE, _MOST_REQUESTS // nodes))
    warm = each // 4
    layer_seconds = facts.dense_seconds + facts.wire_seconds + facts.core_seconds
    ready = [(chance.uniform(0, layer_seconds), node, 0) for node in range(nodes)]
    heapq.heapify(ready)
    begun: dict[int, float] = {}
    taken, last = [], 0.0
    # Requests are served in the order in which they are sent: a server's queue is a sum, not a list of events.
    while ready:
        now, node, done = heapq.heappop(ready)
        if done == warm:
            begun[node] = now
        if done == each:
            taken.append((now - begun[node]) / (each - warm))
            last = max(last, now)
            continue
        parts = stores[(node + done) % hosts].parts
        moment = now + facts.wire_seconds / 2
        moment = parts["link in"].serve(moment, 8 * facts.request_bytes / host.bits_per_second)
        moment = parts["daemon"].serve(moment, facts.daemon_seconds)
        moment = parts["drive"].serve(moment, facts.missed_bytes / host.drive_bytes_per_second)
        moment = parts["cores"].serve(moment, facts.core_seconds)
        moment = parts["link out"].serve(moment, 8 * facts.answer_bytes / host.bits_per_second)
        heapq.heappush(ready, (moment + facts.wire_seconds / 2 + facts.dense_seconds, node, done + 1))
    busy = {name: sum(store.parts[name].busy for store in stores) / hosts / last for name in stores[0].parts}
    seconds = sum(taken) / len(taken) * facts.layers
    limit = max(busy, key=lambda name: busy[name])
    return {
        "nodes": nodes,
        "hosts": hosts,
        "tokens_per_second": 1 / seconds,
        "total_tokens_per_second": nodes / seconds,
        "busy": busy,
        "limit": limit if busy[limit] > 0.5 else "the node itself",
    }
