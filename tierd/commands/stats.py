"""`tierd stats`: what a running daemon counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from tierd.addresses import Address, default_socket, parse_address
from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc
from tierd.rpc import CHANNEL_OPTIONS, error_of
from tierd.sizes import format_bytes

__all__ = ["fetch_stats", "register", "stats_object"]

_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(stats)


def stats(
    daemon: Annotated[
        str, typer.Argument(metavar="STORE", help="unix:PATH, HOST:PORT, or the directory that a daemon serves.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Show what a running daemon has counted since it started."""
    directory = Path(daemon)
    address = default_socket(directory) if directory.is_dir() else parse_address(daemon, option="STORE")
    answer = stats_object(asyncio.run(fetch_stats(address)))
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        _show(answer, address)


async def fetch_stats(address: Address) -> pb.GetStatsResponse:
    """Ask the daemon; DaemonUnavailable if nobody answers within 5 s."""
    async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
        try:
            return await admin_pb2_grpc.AdminServiceStub(channel).GetStats(pb.GetStatsRequest(), timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(address)) from error


def stats_object(answer: pb.GetStatsResponse) -> dict[str, Any]:
    """The message as plain JSON values; 64-bit counters as numbers, not as strings as protobuf's JSON has them."""
    plain: dict[str, Any] = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {name: _numbers(value) for name, value in plain.items() if name != "boot_id"} | {"boot_id": answer.boot_id}


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: inner if name == "name" else _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _show(answer: dict[str, Any], address: Address) -> None:
    console = Console(highlight=False)
    asked, arena = answer["requests"], answer["arena"]
    table = Table.grid(padding=(0, 2))
    share = asked["hits"] / asked["requests"] if asked["requests"] else 0.0
    table.add_row("daemon", f"{address} · up {answer['uptime_seconds']:.0f} s")
    table.add_row(
        "experts",
        f"{asked['requests']:,} asked · {asked['hits']:,} in RAM ({share:.0%}) · {asked['misses']:,} read · "
        f"{asked['joined']:,} joined · {asked['cancelled']:,} cancelled · {asked['failed']:,} failed · "
        f"{asked['pending']:,} pending",
    )
    table.add_row(
        "arena",
        f"{format_bytes(arena['bytes'])} · {arena['slots']:,} slots: {arena['slots_ready']:,} ready "
        f"({arena['slots_granted']:,} granted), {arena['slots_filling']:,} filling, {arena['slots_free']:,} free · "
        f"{arena['evictions']:,} evictions",
    )
    for drive in answer["drives"]:
        table.add_row(
            f"drive {drive['name']}",
            f"{drive['reads']:,} reads · {format_bytes(drive['bytes'])} · {drive['errors']:,} errors · "
            f"{'direct' if drive['direct'] else 'buffered'}",
        )
    for node in answer["sessions"]:
        table.add_row(
            f"node {node['id']}",
            f"{node['name']} · {node['requests']:,} experts asked · {node['grants']:,} granted"
            + ("" if node["attached"] else " · not attached"),
        )
    console.print(table)
