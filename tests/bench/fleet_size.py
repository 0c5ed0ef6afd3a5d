"""Measures how many nodes one daemon carries, and simulates what a thousand would need.

    python tests/bench/fleet_size.py [--far far.json] [--json]

Sessions ask for a layer's experts by message, again and again, all of them in RAM: what the daemon's one core takes
for a request is its `/proc` time over the requests that it answered, by the number of sessions. Then sessions that say
nothing, and records as bytes. A near node sends a message only for a layer that misses something, so it costs a daemon
less.

With the JSON of `compute-node bench far` the simulation of `compute_node.bench.fleet_simulation` is run with these
costs: a node by worker on hosts of 16 cores, 25 Gbit/s and drives of 3 GB/s.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer

from compute_node.bench.fleet_simulation import FleetFacts, StoreHost, simulate_fleet
from compute_node.bench.geometries import geometry_named
from compute_node.bench.quiet import Quiet
from compute_node.models.registry import family_of
from tierd.api import session_pb2, session_pb2_grpc, store_pb2, store_pb2_grpc
from tierd.client.private_daemon import PrivateDaemon
from tierd.rpc import CHANNEL_OPTIONS, PROTOCOL, read_safely
from tierd.store.synthetic import make_store

LAYERS, EXPERTS, TOP_K, RECORD_BYTES = 4, 64, 8, 1 << 20
SESSIONS = (1, 4, 16, 64, 256)
TRANSFERS = 4
WARM_SECONDS = 30.0
FLEETS = (1, 10, 100, 1000)
HOST = StoreHost(bits_per_second=25e9, cores=16, drive_bytes_per_second=3e9)
ENOUGH = 0.8


def core_seconds(pid: int) -> float:
    """Processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def open_session(channel: grpc.aio.Channel) -> Any:
    """A stream after its welcome."""
    call = session_pb2_grpc.SessionServiceStub(channel).OpenSession()
    await call.write(session_pb2.OpenSessionRequest(hello=session_pb2.Hello(protocol=PROTOCOL, name="bench")))
    assert (await read_safely(call)).WhichOneof("message") == "welcome"
    return call


async def ask(call: Any, number: int, seconds: float, most: int = 1 << 30) -> list[float]:
    """Ask for layers in turn, for so long or so often; seconds of each answer."""
    loop, taken, asked = asyncio.get_running_loop(), [], 0
    until = loop.time() + seconds
    while (begun := loop.time()) < until and asked < most:
        asked += 1
        first = (number + asked // LAYERS * TOP_K) % (EXPERTS - TOP_K + 1)
        acquire = session_pb2.Acquire(id=asked, layer=asked % LAYERS, experts=range(first, first + TOP_K))
        await call.write(session_pb2.OpenSessionRequest(acquire=acquire))
        lacking = TOP_K
        while lacking:
            message = await read_safely(call)
            lacking -= len(message.notice.ready)
            assert not message.notice.failed
        taken.append(loop.time() - begun)
    return taken


async def measure_sessions(daemon: PrivateDaemon, sessions: int, seconds: float) -> dict[str, Any]:
    """So many sessions that ask, and then say nothing."""
    before = rss_bytes(daemon.pid)
    channels = [grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) for _ in range(sessions)]
    calls = [await open_session(channel) for channel in channels]
    try:
        await asyncio.gather(*(ask(call, number, WARM_SECONDS, most=2) for number, call in enumerate(calls)))
        used, begun = core_seconds(daemon.pid), time.monotonic()
        taken = await asyncio.gather(*(ask(call, number, seconds) for number, call in enumerate(calls)))
        used, lasted = core_seconds(daemon.pid) - used, time.monotonic() - begun
        idle = core_seconds(daemon.pid)
        await asyncio.sleep(seconds)
        idle = core_seconds(daemon.pid) - idle
        memory = rss_bytes(daemon.pid) - before
    finally:
        for call, channel in zip(calls, channels, strict=True):
            call.cancel()
            await channel.close()
    flat = [one for session in taken for one in session]
    return {
        "sessions": sessions,
        "requests_per_second": len(flat) / lasted,
        "daemon_seconds_per_request": used / len(flat),
        "daemon_cores": used / lasted,
        "median_seconds": statistics.median(flat),
        "idle_cores": idle / seconds,
        "session_bytes": memory / sessions,
    }


async def measure_bytes(daemon: PrivateDaemon, seconds: float) -> dict[str, Any]:
    """Records as bytes over a few streams at a time."""
    async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        until, moved = asyncio.get_running_loop().time() + seconds, 0

        async def stream(layer: int) -> None:
            nonlocal moved
            while asyncio.get_running_loop().time() < until:
                call = stub.ReadExperts(store_pb2.ReadExpertsRequest(layer=layer, experts=range(TOP_K)))
                while isinstance(message := await read_safely(call), store_pb2.ReadExpertsResponse):
                    moved += len(message.data)

        used, begun = core_seconds(daemon.pid), time.monotonic()
        await asyncio.gather(*map(stream, range(min(TRANSFERS, LAYERS))))
        lasted = time.monotonic() - begun
        used = core_seconds(daemon.pid) - used
    return {"bytes_per_second": moved / lasted, "daemon_seconds_per_gb": used / moved * 1e9}


def thousand(far: dict[str, Any], request_seconds: float) -> list[dict[str, Any]]:
    """Rows of the simulation, whole model; see `compute_node.bench.far_speed.fleet_rows`."""
    geometry = geometry_named(far["geometry"])
    _, sizes = family_of(geometry.cut(far["layers"]))
    count, hidden, chosen = len(sizes.expert_layers), sizes.hidden_size, sizes.top_k
    core = far["worker_core_seconds_per_token"] / count
    local = 1 / far["local_tokens_per_second"] / count
    facts = FleetFacts(
        layers=geometry.layers,
        dense_seconds=max(0.0, local - core / 2),
        core_seconds=core,
        wire_seconds=max(0.0, 1 / far["worker_tokens_per_second"] / count - local),
        request_bytes=4 * hidden + 4 * chosen,
        answer_bytes=4 * hidden * chosen,
        missed_bytes=far["bytes_missed"] * chosen * far["record_bytes"],
        daemon_seconds=request_seconds * (1 - (1 - far["bytes_missed"]) ** chosen),
    )
    alone = simulate_fleet(facts, HOST, nodes=1, hosts=1)["tokens_per_second"]
    rows = []
    for nodes in FLEETS:
        one, hosts = simulate_fleet(facts, HOST, nodes=nodes, hosts=1), 1
        enough = one
        while hosts < nodes and enough["tokens_per_second"] < ENOUGH * alone:
            hosts *= 2
            enough = simulate_fleet(facts, HOST, nodes=nodes, hosts=hosts)
        busy = sorted(enough["busy"].items(), key=lambda part: -part[1])
        rows.append({"nodes": nodes, "on_one_host": one, "hosts_for_80_percent": hosts, "then_busy": dict(busy)})
    return rows


async def measure(daemon: PrivateDaemon, seconds: float) -> dict[str, Any]:
    """All of it, on one loop."""
    async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
        call = await open_session(channel)
        await ask(call, 0, WARM_SECONDS, most=2 * LAYERS * EXPERTS // TOP_K)  # all experts come into RAM
        call.cancel()
    rows = [await measure_sessions(daemon, sessions, seconds) for sessions in SESSIONS]
    return {"sessions": rows, "as_bytes": await measure_bytes(daemon, seconds)}


def main(
    seconds: Annotated[float, typer.Option(min=0.2, help="Of each measurement.")] = 4.0,
    far: Annotated[Path | None, typer.Option(help="JSON of `compute-node bench far`, for the simulation.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="tierd-fleet-") as path, Quiet(children=True) as quiet:
        store = make_store(
            Path(path) / "store", layers=LAYERS, experts=EXPERTS, top_k=TOP_K, record_bytes=RECORD_BYTES
        )  # fmt: skip
        options = ("--arena", "100%", "--history", "off", "--http", "off", "--log-level", "error")
        daemon = PrivateDaemon(store.path, *options, "--max-sessions", str(max(SESSIONS)))
        try:
            found = asyncio.run(measure(daemon, seconds))
        finally:
            daemon.stop()
    cost = min(row["daemon_seconds_per_request"] for row in found["sessions"])
    found |= {"requests_per_core_second": 1 / cost} | quiet.report()
    if far is not None:
        found["fleets"] = thousand(json.loads(far.read_text()), cost)
    if as_json:
        print(json.dumps(found))
        return
    print("sessions  requests/s  daemon core per request  median answer  idle cores  memory of a session")
    for row in found["sessions"]:
        cost, idle = 1e6 * row["daemon_seconds_per_request"], row["idle_cores"]
        print(
            f"{row['sessions']:8}  {row['requests_per_second']:10.0f}  {cost:20.1f} us"
            f"  {1e3 * row['median_seconds']:10.2f} ms  {idle:10.3f}  {row['session_bytes'] / 1e3:13.0f} kB"
        )
    rate, cost = found["as_bytes"]["bytes_per_second"], found["as_bytes"]["daemon_seconds_per_gb"]
    print(f"as bytes  {rate / 1e9:.2f} GB/s, {cost:.2f} core seconds per GB")
    for row in found.get("fleets", []):
        one = row["on_one_host"]
        print(
            f"{row['nodes']:5} nodes: {one['tokens_per_second']:.3g} tokens/s each on one host ({one['limit']}); "
            f"{row['hosts_for_80_percent']} hosts for 80 %, then busiest: "
            + ", ".join(f"{name} {share:.0%}" for name, share in list(row["then_busy"].items())[:2])
        )
    if found["void"]:
        sys.exit("others took too much of the cores: the run is void")


if __name__ == "__main__":
    typer.run(main)
