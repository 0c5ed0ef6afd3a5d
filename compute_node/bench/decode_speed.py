"""Decoding with experts on the drive: the figure that the whole project is about.

A store of real record size is served by a daemon whose arena holds a part of it. Routes are forced: they use experts
again as often as recorded ones do. Decoding alternates with a probe of the drive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from compute_node.bench.drive_probe import DriveProbe
from compute_node.bench.forced_routes import force_routes
from compute_node.bench.geometries import BenchGeometry
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_model import RandomModel
from compute_node.bench.random_store import random_store
from compute_node.bench.routes import RECORDED
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from tierd.client.arena_source import ArenaSource
from tierd.client.private_daemon import PrivateDaemon
from tierd.store.manifest import Manifest
from tierd.store.store import DenseTensor, ExpertStore

__all__ = ["measure_decode"]

_PROBE_SECONDS: Final = 0.7
_WARM_TOKENS: Final = 4


class _WithDense:
    """The store, but with dense weights of int8 from memory: the bytes of a token are those of a quantised model."""

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


def measure_decode(
    geometry: BenchGeometry,
    *,
    layers: int,
    experts: int | None,
    arena: str,
    threads: int | None,
    numerics: str,
    rounds: int,
    tokens: int,
    daemon_options: tuple[str, ...] = (),
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Decodes `tokens` at a time and probes the drive, in turn.

    Args:
        geometry: of the model.
        layers: of it.
        experts: routed experts of a layer; None: all.
        arena: of the daemon: bytes or a share.
        threads: native threads.
        numerics: of the kernels.
        rounds: turns of each side.
        tokens: of one turn.
        daemon_options: further options of `tierd serve`.
        tell: takes a line when something begins.

    Returns:
        Figures, and both raw sides.
    """
    config = geometry.cut(layers, experts)
    tell("the store, which is made at the first run and may take minutes")
    store = random_store(geometry, layers=layers, experts=experts)
    dense = RandomModel(config)
    sizes = store.geometry
    count, chosen = sizes.layers[0].experts, sizes.top_k
    warm = _WARM_TOKENS + 2 * count // chosen
    length = warm + rounds * tokens
    routes = RECORDED.generate(tokens=length, layers=len(sizes.layers), experts=count, top_k=chosen)
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        options = ["--http", "off", "--log-level", "warning", *daemon_options]
        daemon = PrivateDaemon(store.path, "--arena", arena, *options)
        stack.callback(daemon.stop)
        view = _WithDense(store, dense)
        source = ArenaSource(
            daemon.address, view, name="bench", numerics=numerics, kernel_path=kernel_path(), gone=daemon.gone
        )
        stack.callback(source.close)
        how = ModelOptions(numerics=numerics, context=length + 1, threads=threads)
        model = stack.enter_context(Model(source, how, adapt=lambda program: force_routes(program, routes)))
        walk = TokenWalk(model)
        probe = DriveProbe(store)
        stack.callback(probe.close)
        tell("filling the arena")
        walk.run(warm)
        quiet = Quiet()
        with quiet:
            for number in range(rounds):
                tell(f"decoding, {number + 1} of {rounds}")
                found.append(_turn(walk, source, tokens, probe))
    record = sizes.slot_bytes
    return _figures(found, record, tokens) | quiet.report() | {
        "geometry": geometry.name,
        "layers": layers,
        "experts": count,
        "arena": arena,
        "projected_tokens_per_second": tokens / float(np.median([t["seconds"] for t in found]))
        * layers / geometry.layers,
        "bytes_per_token": dense.dense_bytes_of_a_token + dense.expert_bytes_of_a_token,
        "record_bytes": record,
        "note": geometry.note,
    }  # fmt: skip


def _turn(walk: TokenWalk, source: ArenaSource, tokens: int, probe: DriveProbe) -> dict[str, Any]:
    stats = source.stats
    before = dict(stats.outcomes), stats.wait_seconds, dict(stats.wait_by_outcome)
    seconds, _ = walk.run(tokens)
    return {
        "seconds": seconds,
        "outcomes": {name: count - before[0].get(name, 0) for name, count in stats.outcomes.items()},
        "wait_seconds": stats.wait_seconds - before[1],
        "wait_by_outcome": {name: value - before[2].get(name, 0.0) for name, value in stats.wait_by_outcome.items()},
        "probe_bytes_per_second": probe.rate(_PROBE_SECONDS),
    }


def _figures(turns: list[dict[str, Any]], record: int, tokens: int) -> dict[str, Any]:
    """Medians over turns. A joined read is a demanded miss, too: the drive had to deliver it."""
    read = [record * (turn["outcomes"]["miss"] + turn["outcomes"]["joined"]) / turn["seconds"] for turn in turns]
    asked = sum(sum(turn["outcomes"].values()) for turn in turns)
    hits = sum(turn["outcomes"]["hit"] for turn in turns)
    return {
        "drive_share": float(np.median([
            rate / turn["probe_bytes_per_second"] for rate, turn in zip(read, turns, strict=True)
        ])),
        "tokens_per_second": tokens / float(np.median([turn["seconds"] for turn in turns])),
        "missed_bytes_per_second": float(np.median(read)),
        "probe_bytes_per_second": float(np.median([turn["probe_bytes_per_second"] for turn in turns])),
        "hit_rate": hits / asked if asked else None,
        "wait_share": float(np.median([turn["wait_seconds"] / turn["seconds"] for turn in turns])),
        "turns": turns,
    }  # fmt: skip
