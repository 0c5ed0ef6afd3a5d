"""`tierd stats`: what a running daemon counted."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.table import Table

from tierd.addresses import Address
from tierd.client.daemon_stats import fetch_stats, stats_object
from tierd.commands.daemon_name import daemon_address
from tierd.sizes import format_bytes, format_duration, format_share
from tierd.terminal import show, wide_console

__all__ = ["register"]


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
    address = daemon_address(daemon, option="STORE")
    answer = stats_object(asyncio.run(fetch_stats(address)))
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        _show(answer, address)


def _show(answer: dict[str, Any], address: Address) -> None:
    console = wide_console()
    asked, arena = answer["requests"], answer["arena"]
    table = Table.grid(padding=(0, 2))
    share = asked["hits"] / asked["requests"] if asked["requests"] else 0.0
    table.add_row("daemon", f"{address} · up {format_duration(answer['uptime_seconds'])}")
    table.add_row(
        "experts",
        f"{asked['requests']:,} asked · {asked['hits']:,} in RAM ({format_share(share)}), "
        f"{asked['unasked']:,} of them without a message · {asked['misses']:,} read · "
        f"{asked['joined']:,} joined · {asked['cancelled']:,} cancelled · {asked['failed']:,} failed · "
        f"{asked['pending']:,} pending",
    )
    table.add_row(
        "arena",
        f"{format_bytes(arena['bytes'])} · {arena['slots']:,} slots: {arena['slots_ready']:,} ready "
        f"({arena['slots_granted']:,} granted), {arena['slots_filling']:,} filling, {arena['slots_free']:,} free · "
        f"{arena['evictions']:,} evictions",
    )
    left = f" · {format_bytes(arena['excess_bytes'])} still to be given back" if arena["excess_bytes"] else ""
    table.add_row("memory", f"the daemon may have {format_bytes(arena['ram_bytes'])}{left}")
    history = answer["history"]
    if history["path"] or history["pinned"]:
        # Pinned experts are read as well, though no history wanted them.
        wanted = max(history["warm_wanted"], history["warm_read"] + history["warm_left"])
        read = f"{history['warm_read']:,} of {wanted:,} experts read · " if wanted else ""
        table.add_row("warm start", f"{read}{history['pinned']:,} pinned · {history['path'] or 'no history'}")
    for drive in answer["drives"]:
        table.add_row(
            f"drive {drive['name']}",
            f"{drive['reads']:,} reads · {format_bytes(drive['bytes'])} · {drive['errors']:,} errors · "
            f"{'direct' if drive['direct'] else 'buffered'}" + ("" if drive["up"] else f" · {drive['state'].upper()}"),
        )
    for node in answer["sessions"]:
        table.add_row(
            f"node {node['id']}",
            f"{node['name']} · {node['requests']:,} experts asked · {node['grants']:,} granted"
            + ("" if node["attached"] else " · not attached"),
        )
    show(console, table)
