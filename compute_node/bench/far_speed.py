"""A far node by bytes and by worker beside one on the store's host: speed, bytes on the link, and the same tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from compute_node import embedded
from compute_node.bench.child import Child
from compute_node.bench.far_link import STORE_HOST, FarLink
from compute_node.bench.fleet_simulation import FleetFacts, StoreHost, simulate_fleet
from compute_node.bench.geometries import BenchGeometry, geometry_named
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_store import random_store
from compute_node.models.registry import family_of
from tierd.checkpoint.convert import convert
from tierd.policy.drawn_routes import RECORDED
from tierd.store.formats import ExpertFormat
from tierd.store.geometry import Geometry
from tierd.store.records import expert_layout
from tierd.store.store import ExpertStore

__all__ = ["fleet_rows", "link_budget", "measure_far"]

_SIDES: Final = ("local", "bytes", "worker")
_PROMPT: Final = "It was a fine morning, and"
_STORE_PORT: Final = 9470
_WORKER_PORT: Final = 9471
_START_SECONDS: Final = 300.0
_BUDGET_MODEL: Final = "glm-5.2"
_BUDGET_LINKS: Final = (1, 10, 25, 100)
_FLEETS: Final = (1, 10, 100, 1000)
_FLEET_HOST: Final = StoreHost(bits_per_second=25e9, cores=16, drive_bytes_per_second=3e9)
"""What a store's host is taken to have."""
_ENOUGH: Final = 0.8
"""Share of a lone node's speed that a node of a fleet should have."""


def measure_far(
    geometry: BenchGeometry,
    *,
    layers: int,
    arena: str,
    numerics: str,
    threads: int | None,
    rounds: int,
    tokens: int,
    bits_per_second: int,
    delay: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Three nodes decode in turn: one beside the store, and two behind a slow link.

    Args:
        geometry: of a model of random weights, whose routes are forced; the embedded model follows.
        layers: of it.
        arena: RAM for experts of the node by bytes: an amount or a share. The daemon's own arena holds all experts.
        numerics: of the kernels.
        threads: native threads of each process.
        rounds: turns of each node.
        tokens: of one turn.
        bits_per_second: of the link.
        delay: seconds that a proxy holds back whatever is sent, each way.
        tell: takes a line when something begins.

    Returns:
        Figures of the geometry, those of the embedded model under `embedded`, `link_budget`, and all turns.

    Raises:
        UsageError: no network namespaces can be made here.
    """
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierd-far-")))
        link = stack.enter_context(FarLink(bits_per_second))
        quiet = stack.enter_context(Quiet(children=True))
        tell("the stores; that of the geometry is made at the first run")
        store = random_store(geometry, layers=layers)
        small = scratch / "embedded-store"
        convert(embedded.path(), small, experts="int4-g64")
        sizes = store.geometry
        length = (rounds + 1) * tokens
        routes = RECORDED.generate(
            tokens=length, layers=len(sizes.layers), experts=sizes.layers[0].experts, top_k=sizes.top_k
        )
        np.save(scratch / "routes.npy", routes)
        common = {"arena": arena, "numerics": numerics, "threads": threads}
        for name, path, options in (
            ("geometry", store.path, {"routes": str(scratch / "routes.npy"), "prompt": "", "tokens": length}),
            ("embedded", small, {"routes": "", "prompt": _PROMPT, "tokens": tokens}),
        ):
            tell(f"three nodes of {path.name}")
            turns = _measure(link, scratch / name, path, common | options, delay=delay, rounds=rounds, tell=tell)
            found[name] = _figures(turns, ExpertStore.open(path).geometry)
    figures: dict[str, Any] = found["geometry"]
    return figures | quiet.report() | {
        "geometry": geometry.name,
        "layers": layers,
        "projected_worker_tokens_per_second": found["geometry"]["worker_tokens_per_second"] * layers / geometry.layers,
        "projected_bytes_tokens_per_second": found["geometry"]["bytes_tokens_per_second"] * layers / geometry.layers,
        "embedded": found["embedded"],
        "identical": found["geometry"]["identical"] and found["embedded"]["identical"],
        "bits_per_second": bits_per_second,
        "delay_seconds": delay,
        "link_budget": link_budget(found["geometry"], sizes),
        "fleet": fleet_rows(found["geometry"], sizes, layers=geometry.layers),
    }  # fmt: skip


def link_budget(figures: dict[str, Any], measured: Geometry) -> dict[str, Any]:
    """What the links of a far node of GLM-5.2 would carry, from what was measured.

    Args:
        figures: of `measure_far`.
        measured: the geometry that they belong to.

    Returns:
        Bytes of a token both ways, and the tokens per second that the link alone allows, by its gigabits per second;
        `message_seconds` is what a layer's message cost beside its bytes.
    """
    _, sizes = family_of(geometry_named(_BUDGET_MODEL).config)
    layers, chosen = len(sizes.expert_layers), sizes.top_k
    record = expert_layout(ExpertFormat("int4-g64"), sizes.hidden_size, sizes.expert_width).record_bytes

    def payload(count: int, hidden: int, k: int) -> int:
        return count * (4 * hidden + 4 * k + 4 * k * hidden)

    overhead = figures["worker_bytes_per_token"] / payload(len(measured.layers), measured.hidden_size, measured.top_k)
    by_worker = payload(layers, sizes.hidden_size, chosen) * overhead
    by_bytes = record * chosen * layers * figures["bytes_missed"]
    message = max(0.0, 1 / figures["worker_tokens_per_second"] - 1 / figures["local_tokens_per_second"])
    seconds = message / len(measured.layers)
    return {
        "model": _BUDGET_MODEL,
        "worker_bytes_per_token": by_worker,
        "bytes_bytes_per_token": by_bytes,
        "message_seconds": seconds,
        "tokens_per_second": [
            {
                "gigabits_per_second": rate,
                "worker": 1 / (layers * seconds + 8 * by_worker / (rate * 1e9)),
                "bytes": rate * 1e9 / (8 * by_bytes) if by_bytes else None,
            }
            for rate in _BUDGET_LINKS
        ],
    }


def fleet_rows(figures: dict[str, Any], measured: Geometry, *, layers: int) -> list[dict[str, Any]]:
    """Nodes by worker on a store's host with 16 cores, 25 Gbit/s and drives of 3 GB/s, by simulation.

    Args:
        figures: of `measure_far`.
        measured: the geometry that they belong to.
        layers: of the whole model.

    Returns:
        For each number of nodes what one host gives, and with how many hosts a node would have 80 % of the speed that
        it has alone; see `simulate_fleet`. The host's RAM holds the share of experts that the node by bytes held.
    """
    count, hidden, chosen = len(measured.layers), measured.hidden_size, measured.top_k
    core = figures["worker_core_seconds_per_token"] / count
    local = 1 / figures["local_tokens_per_second"] / count
    facts = FleetFacts(
        layers=layers,
        dense_seconds=max(0.0, local - core / 2),
        core_seconds=core,
        wire_seconds=max(0.0, 1 / figures["worker_tokens_per_second"] / count - local),
        request_bytes=4 * hidden + 4 * chosen,
        answer_bytes=4 * hidden * chosen,
        missed_bytes=figures["bytes_missed"] * chosen * measured.slot_bytes,
    )
    alone = simulate_fleet(facts, _FLEET_HOST, nodes=1, hosts=1)["tokens_per_second"]
    rows = []
    for nodes in _FLEETS:
        row = simulate_fleet(facts, _FLEET_HOST, nodes=nodes, hosts=1)
        hosts = 1
        while hosts < nodes and _slow(facts, nodes, hosts, alone):
            hosts *= 2
        rows.append(row | {"hosts_for_80_percent": hosts})
    return rows


def _slow(facts: FleetFacts, nodes: int, hosts: int, alone: float) -> bool:
    found = simulate_fleet(facts, _FLEET_HOST, nodes=nodes, hosts=hosts)
    return bool(found["tokens_per_second"] < _ENOUGH * alone)


def _measure(
    link: FarLink,
    scratch: Path,
    store: Path,
    options: dict[str, Any],
    *,
    delay: float,
    rounds: int,
    tell: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """All turns, by side."""
    scratch.mkdir()
    socket = f"unix:{scratch}/d.sock"
    threads = [] if options["threads"] is None else ["--threads", str(options["threads"])]
    with ExitStack() as stack:

        def start(name: str, command: list[str], ready: str) -> Child:
            child = Child(name, command, scratch / f"{name}.log")
            stack.callback(child.end)
            child.wait_for(ready)
            return child

        start(
            "daemon",
            link.beside_store(
                "tierd", "serve", str(store), "--listen", f"{STORE_HOST}:{_STORE_PORT}", "--insecure",
                "--local", socket, "--arena", "100%", "--history", "off", "--http", "off", "--log-level", "warning",
                "--stop-at-eof",
            ),
            "listening on",
        )  # fmt: skip
        worker = start(
            "worker",
            link.beside_store(
                "compute_node", "worker", socket, "--listen", f"{STORE_HOST}:{_WORKER_PORT}", "--insecure",
                "--numerics", options["numerics"], *threads,
            ),
            "listening on",
        )  # fmt: skip
        for port in (_STORE_PORT, _WORKER_PORT):
            command = link.beside_node(
                "compute_node.bench.delay_proxy", f"127.0.0.1:{port}", f"{STORE_HOST}:{port}", str(delay)
            )
            start(f"proxy-{port}", command, "passing")
        far: dict[str, Any] = {"store": f"127.0.0.1:{_STORE_PORT}"}
        sides: dict[str, dict[str, Any]] = {
            "local": {"store": socket, "experts": "arena", "workers": [], "arena": None},
            "bytes": far | {"experts": "bytes", "workers": []},
            "worker": far | {"experts": "worker", "workers": [f"127.0.0.1:{_WORKER_PORT}"]},
        }
        nodes = {}
        for side, own in sides.items():
            tell(f"starting the node {side}")
            place = link.beside_store if side == "local" else link.beside_node
            command = place("compute_node.bench.far_node", json.dumps(options | own))
            nodes[side] = start(side, command, "ready")
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        tokens = options["tokens"] if options["prompt"] else options["tokens"] // (rounds + 1)
        for number in range(rounds + 1):
            tell(f"turn {number} of {rounds}" if number else "filling the node's RAM")
            for side, node in nodes.items():
                before = worker.core_seconds()
                told = node.ask(str(tokens))
                told["worker_core_seconds"] = worker.core_seconds() - before
                if number:
                    found[side].append(told)
        return found


def _figures(turns: dict[str, list[dict[str, Any]]], geometry: Geometry) -> dict[str, Any]:
    figures: dict[str, Any] = {"turns": turns}
    said = {side: [turn["token_ids"] for turn in turns[side]] for side in _SIDES}
    figures["identical"] = said["local"] == said["bytes"] == said["worker"]
    for side in _SIDES:
        count = len(said[side][0])
        figures[f"{side}_tokens_per_second"] = count / float(np.median([turn["seconds"] for turn in turns[side]]))
        if side != "local":
            figures[f"{side}_bytes_per_token"] = float(np.median([turn["link_bytes"] / count for turn in turns[side]]))
    figures["worker_core_seconds_per_token"] = float(
        np.median([turn["worker_core_seconds"] / len(turn["token_ids"]) for turn in turns["worker"]])
    )
    asked = sum(turn["requested"] for turn in turns["bytes"])
    figures["bytes_missed"] = 1 - sum(turn["tiers"].get("node", 0) for turn in turns["bytes"]) / max(1, asked)
    figures["record_bytes"] = geometry.slot_bytes
    return figures
