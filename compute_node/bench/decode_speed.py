"""Decoding with experts on the drive: the figure that the whole project is about.

A store of real record size is served by a daemon whose arena holds a part of it. Routes are forced: they use experts
again as often as recorded ones do. Decoding alternates with a probe of the drive; and with hints with decoding without,
where hints are asked for: these are right as often as those of the node were on the embedded model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from compute_node.bench.decode_limit import delivered_bytes
from compute_node.bench.dense_view import DenseView
from compute_node.bench.drawn_hints import MEASURED, DrawnHints
from compute_node.bench.drive_probe import DriveProbe
from compute_node.bench.forced_routes import force_routes
from compute_node.bench.geometries import BenchGeometry
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_model import RandomModel
from compute_node.bench.random_store import random_store
from compute_node.bench.timeline import TimedSource, Timeline
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_dump import fetch_dump
from tierd.client.daemon_stats import fetch_stats
from tierd.client.loop_thread import LoopThread
from tierd.client.private_daemon import PrivateDaemon
from tierd.policy.drawn_routes import RECORDED
from tierd.prefetch.throttle import Throttle

__all__ = ["measure_decode"]

_PROBE_SECONDS: Final = 0.7
_WARM_TOKENS: Final = 4
_CALL_SECONDS: Final = 30.0
_DUMP_SECONDS: Final = 10.0


def measure_decode(
    geometry: BenchGeometry,
    *,
    layers: int,
    experts: int | None,
    experts_format: str = "int4-g64",
    arena: str,
    threads: int | None,
    numerics: str,
    rounds: int,
    tokens: int,
    daemon_options: tuple[str, ...] = (),
    prefetch: str = "off",
    timeline: Path | None = None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Decodes `tokens` at a time and probes the drive, in turn.

    Args:
        geometry: of the model.
        layers: of it.
        experts: routed experts of a layer; None: all.
        experts_format: of the experts; dense weights are int8.
        arena: of the daemon: bytes or a share.
        threads: native threads.
        numerics: of the kernels.
        rounds: turns of each side.
        tokens: of one turn.
        daemon_options: further options of `tierd serve`.
        prefetch: `off`; `on` or `auto`: turns with hints alternate with turns without, and are the figures.
        timeline: file for what happened in the last turns, as a Chrome trace.
        tell: takes a line when something begins.

    Returns:
        Figures, and all raw sides; with hints, those without are under `without_prefetch`.
    """
    config = geometry.cut(layers, experts)
    tell("the store, which is made at the first run and may take minutes")
    store = random_store(geometry, layers=layers, experts=experts, experts_format=experts_format)
    dense = RandomModel(config)
    sizes = store.geometry
    count, chosen = sizes.layers[0].experts, sizes.top_k
    warm = _WARM_TOKENS + 2 * count // chosen
    sides = ("off",) if prefetch == "off" else ("off", "on")
    length = warm + rounds * len(sides) * tokens
    routes = RECORDED.generate(tokens=length, layers=len(sizes.layers), experts=count, top_k=chosen)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    watched = Timeline() if timeline is not None else None
    with ExitStack() as stack:
        options = ["--http", "off", "--log-level", "warning", "--prefetch", prefetch, *daemon_options]
        daemon = PrivateDaemon(store.path, "--arena", arena, *options)
        stack.callback(daemon.stop)
        view = DenseView(store, dense)
        source = ArenaSource(
            daemon.address, view, name="bench", numerics=numerics, kernel_path=kernel_path(), gone=daemon.gone
        )
        stack.callback(source.close)
        how = ModelOptions(numerics=numerics, context=length + 1, threads=threads)
        seen = source if watched is None else TimedSource(source, watched)
        model = stack.enter_context(Model(seen, how, adapt=lambda program: force_routes(program, routes)))
        walk = TokenWalk(model)
        probe = DriveProbe(store)
        stack.callback(probe.close)
        tell("filling the arena")
        begun = time.perf_counter()
        walk.run(warm)
        hints = DrawnHints(
            source,
            [entry.layer for entry in sizes.layers],
            count,
            routes,
            MEASURED,
            right=True,
            throttle=Throttle(fixed=prefetch == "on"),
            lead_seconds=2 * (time.perf_counter() - begun) / (warm * len(sizes.layers)),
        )
        if watched is not None:
            model.watch(watched.computed)
        quiet, speeds = Quiet(beside=[daemon.pid]), [probe.rate(_PROBE_SECONDS)]
        with quiet:
            for number in range(rounds):
                tell(f"decoding, {number + 1} of {rounds}")
                # The order turns round, so that a drift of the machine touches both alike.
                for side in sides if number % 2 == 0 else sides[::-1]:
                    model.hinting = hints if side == "on" else None
                    hints.restart(len(walk))
                    turn = _turn(walk, source, tokens, watched)
                    # The drive's own speed drifts: a turn stands between two probes.
                    speeds.append(probe.rate(_PROBE_SECONDS))
                    found[side].append(turn | {"probe_bytes_per_second": sum(speeds[-2:]) / 2})
        if watched is not None and timeline is not None:
            dump = fetch_dump(daemon.address, _DUMP_SECONDS)
            watched.write(timeline, LoopThread.shared().run(dump, seconds=_CALL_SECONDS, what="the daemon's dump"))
    record = sizes.slot_bytes
    figures = {side: _figures(turns, record, tokens) for side, turns in found.items()}
    if prefetch != "off":
        gain = figures["on"]["tokens_per_second"] / figures["off"]["tokens_per_second"]
        figures["on"] |= {"without_prefetch": figures["off"], "prefetch_gain": gain}
    return figures[sides[-1]] | quiet.report() | {
        "prefetch": prefetch,
        "geometry": geometry.name,
        "layers": layers,
        "experts": count,
        "arena": arena,
        "projected_tokens_per_second": figures[sides[-1]]["tokens_per_second"] * layers / geometry.layers,
        "bytes_per_token": dense.dense_bytes_of_a_token + dense.expert_bytes_of_a_token,
        "record_bytes": record,
        "note": geometry.note,
    }  # fmt: skip


def _turn(walk: TokenWalk, source: ArenaSource, tokens: int, watched: Timeline | None) -> dict[str, Any]:
    stats = source.stats
    before = dict(stats.outcomes), stats.wait_seconds, dict(stats.wait_by_outcome)
    prefetched = _prefetched(source)
    begun = time.monotonic()
    seconds, _ = walk.run(tokens)
    if watched is not None:
        watched.span("turns", f"{tokens} tokens", begun, time.monotonic())
    return {
        "seconds": seconds,
        "prefetched_bytes_used": _prefetched(source) - prefetched,
        "outcomes": {name: count - before[0].get(name, 0) for name, count in stats.outcomes.items()},
        "wait_seconds": stats.wait_seconds - before[1],
        "wait_by_outcome": {name: value - before[2].get(name, 0.0) for name, value in stats.wait_by_outcome.items()},
    }


def _prefetched(source: ArenaSource) -> int:
    """Bytes that the daemon read ahead and the node then used, since the daemon started."""
    fetching = fetch_stats(source.address)
    stats = LoopThread.shared().run(fetching, seconds=_CALL_SECONDS, what="the daemon's counts")
    return int(stats.prefetch.used.bytes)


def _figures(turns: list[dict[str, Any]], record: int, tokens: int) -> dict[str, Any]:
    """Medians over turns."""
    read = [delivered_bytes(turn, record) / turn["seconds"] for turn in turns]
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
