"""How near to the machine's limit an answer ran: what the model, the memory and the daemon's drives say together."""

from __future__ import annotations

from dataclasses import replace

from compute_node.bench.memory_bandwidth import memory_bandwidth, remeasured_bandwidth
from compute_node.commands.opening import Opened
from compute_node.engine.generate import Finished
from compute_node.engine.limit import SpeedLimit, dense_bytes_of_a_token, expert_bytes_of_a_token
from tierd.client.daemon_stats import DaemonStats

__all__ = ["drive_bandwidth", "speed_limit"]


def drive_bandwidth(stats: DaemonStats | None) -> float | None:
    """Bytes per second of all drives that a daemon reads from, as it measured them; None where that is not known."""
    rates = [] if stats is None else [drive.bandwidth for drive in stats.drives if drive.up]
    return sum(rates) or None


def speed_limit(opened: Opened, finished: Finished, stats: DaemonStats | None) -> SpeedLimit | None:
    """The limit of an answer; measures the memory's bandwidth if this machine's is not known yet.

    Args:
        opened: what generated it.
        finished: the generator's last event.
        stats: of the daemon; None without one.

    Returns:
        None where there is nothing to say: no step after the first token, or no memory to measure with.
    """
    steps, cost = len(finished.token_ids) - 1, finished.decode
    if steps < 1 or cost.seconds <= 0:
        return None
    memory = memory_bandwidth(opened.model.threads)
    if memory is None:
        return None
    manifest, drives = opened.source.store.manifest, drive_bandwidth(stats)
    token = dense_bytes_of_a_token(manifest, tied_embeddings=opened.model.config.tied_embeddings)
    token += expert_bytes_of_a_token(manifest.geometry)
    missed = cost.missed_experts * manifest.geometry.slot_bytes
    limit = SpeedLimit(cost, steps, steps * token / memory, 0.0 if drives is None else missed / drives)
    if limit.share > 1 and limit.memory_seconds > limit.drive_seconds:
        better = remeasured_bandwidth(opened.model.threads)
        if better is not None:
            return replace(limit, memory_seconds=steps * token / better)
    return limit
