"""Measures how fast records travel over gRPC on this host: Unix socket and TCP, by size of record and of chunk.

    python tests/bench/transport.py [--rounds 5] [--json]

A child process streams records of 1, 4 and 19 MiB in chunks; both ends use the product's own channel options.
Transports and chunks take turns; the figures are medians of GB/s and of the client's processor seconds per GB. The
product's chunk is `tierd.rpc.CHUNK_BYTES`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
import uvloop

from tierd.rpc import CHANNEL_OPTIONS, CHUNK_BYTES, read_safely, server_options

RECORDS = (1 << 20, 4 << 20, 19 << 20)
CHUNKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
ROOM = 64 << 10
"""A message must stay below the product's limit with its frame."""
SLICE_BYTES = 256 << 20
METHOD = "/bench.Transport/Read"


async def serve(socket: str) -> None:
    """Answer on a Unix socket and on a TCP port, which is printed, until standard input ends."""
    data = bytes(max(RECORDS))

    async def read(request: bytes, _context: Any) -> Any:
        record, chunk = json.loads(request)
        for start in range(0, record, chunk):
            yield data[start : min(start + chunk, record)]

    server = grpc.aio.server(options=server_options(keepalive_seconds=10.0))
    handlers = {"Read": grpc.unary_stream_rpc_method_handler(read)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Transport", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def processor_seconds() -> float:
    """Of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def fetch(target: str, record: int, chunk: int) -> tuple[float, float]:
    """GB/s and this process's processor seconds per GB, for `SLICE_BYTES` in records."""
    count = SLICE_BYTES // record
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream(METHOD)
        request = json.dumps([record, min(chunk, (4 << 20) - ROOM)]).encode()
        begun, busy, got = time.perf_counter(), processor_seconds(), 0
        for _ in range(count):
            stream = call(request)
            while (piece := await read_safely(stream)) is not grpc.aio.EOF:
                got += len(piece)
        seconds = time.perf_counter() - begun
    assert got == count * record
    return got / seconds / 1e9, (processor_seconds() - busy) / got * 1e9


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    serving: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Measure and print."""
    if serving:
        uvloop.run(serve(serving))
        return
    with tempfile.TemporaryDirectory(prefix="tierd-transport-") as folder:
        socket = Path(folder) / "s"
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            targets = {"unix": f"unix:{socket}", "tcp": f"127.0.0.1:{int(child.stdout.readline())}"}
            rates = uvloop.run(measure(targets, rounds))
        finally:
            child.communicate(timeout=20)
    rows = [
        {
            "record_mib": record >> 20, "chunk_kib": chunk >> 10, "transport": name,
            "gb_per_second": statistics.median(rate for rate, _ in found),
            "client_cpu_seconds_per_gb": statistics.median(cpu for _, cpu in found), "all": [rate for rate, _ in found],
        }
        for (record, chunk, name), found in rates.items()
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"rows": rows, "product_chunk_kib": CHUNK_BYTES >> 10}))
        return
    for row in rows:
        print("{record_mib:3} MiB  {chunk_kib:5} KiB  {transport:5} {gb_per_second:6.2f} GB/s".format(**row))


async def measure(targets: dict[str, str], rounds: int) -> dict[Any, list[tuple[float, float]]]:
    """All combinations in turn, `rounds` times."""
    rates: dict[Any, list[tuple[float, float]]] = {key: [] for key in product(RECORDS, CHUNKS, targets)}
    for _ in range(rounds):
        for (record, chunk, name), found in rates.items():
            found.append(await fetch(targets[name], record, chunk))
    return rates


if __name__ == "__main__":
    typer.run(main)
