"""`tierd top`: a daemon's figures, live on a terminal."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tierd.client.daemon_stats import fetch_stats, stats_object
from tierd.commands.daemon_name import daemon_address
from tierd.errors import DaemonUnavailable
from tierd.sizes import format_bytes, format_duration, format_share
from tierd.terminal import show, wide_console

__all__ = ["register", "view"]

_BAR = range(8, 41)
_BESIDE_BAR = 62


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(top)


def top(
    daemon: Annotated[
        str, typer.Argument(metavar="STORE", help="unix:PATH, HOST:PORT, or the directory that a daemon serves.")
    ],
    *,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1, max=60.0)] = 1.0,
    looks: Annotated[int, typer.Option(help="End after so many; 0 goes on until Ctrl-C.", min=0)] = 0,
) -> None:
    """Show what a running daemon does, again and again; in a pipe, one block of lines per look."""
    address = daemon_address(daemon, option="STORE")

    def look() -> tuple[float, dict[str, Any]]:
        return time.monotonic(), stats_object(asyncio.run(fetch_stats(address)))

    console = wide_console()
    before = look()
    done = 0
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while not looks or done < looks:
            time.sleep(interval)
            try:
                now = look()
            except DaemonUnavailable:
                if not console.is_terminal:
                    raise
                live.update(Text(f"{address} does not answer; looking again …", style="bold red"), refresh=True)
                continue
            shown = view(str(address), before[1], now[1], now[0] - before[0], width=console.width)
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                show(console, shown)
            before = now
            done += 1


def view(address: str, before: dict[str, Any], now: dict[str, Any], seconds: float, *, width: int) -> RenderableType:
    """One look: rates since the one before, and what is now.

    Args:
        address: of the daemon.
        before: its statistics then, see `tierd.client.daemon_stats`.
        now: its statistics now.
        seconds: between the two.
        width: of the terminal, in columns.
    """
    if before["boot_id"] != now["boot_id"]:
        before = now  # another daemon: it counts from zero
    asked, arena = now["requests"], now["arena"]

    def rise(*path: str) -> float:
        a: Any = before
        b: Any = now
        for name in path:
            a, b = a[name], b[name]
        return max(0.0, float(b) - float(a))

    wanted = rise("requests", "requests")
    share = f"{format_share(rise('requests', 'hits') / wanted)} in RAM" if wanted else "nobody asks"
    waited = rise("requests", "miss_wait_seconds") + rise("requests", "joined_wait_seconds")
    lines = Table.grid(padding=(0, 2))
    lines.add_row("daemon", f"{address} · up {format_duration(now['uptime_seconds'])}")
    lines.add_row(
        "experts",
        f"{wanted / seconds:,.0f}/s asked · {share} · {rise('requests', 'misses') / seconds:,.0f}/s read · "
        f"{asked['pending']:,} pending · waited {waited / seconds:.2f} s/s",
    )
    used = arena["slots_ready"] / arena["slots"] if arena["slots"] else 0.0
    bar = min(max(width - _BESIDE_BAR, _BAR[0]), _BAR[-1])
    filled = round(used * bar)
    lines.add_row(
        "RAM",
        f"{'█' * filled}{'░' * (bar - filled)} {arena['slots_ready']:,} of {arena['slots']:,} · "
        f"{format_bytes(arena['bytes'])} · {rise('arena', 'evictions') / seconds:,.0f}/s leave",
    )
    then = {drive["name"]: drive for drive in before["drives"]}
    for drive in now["drives"]:
        moved = max(0, drive["bytes"] - then.get(drive["name"], drive)["bytes"]) / seconds
        style = "" if drive["state"] == "up" else "bold red"
        lines.add_row(
            f"drive {drive['name']}",
            Text(
                f"{format_bytes(int(moved))}/s · {drive['in_flight']:,} in flight · {drive['errors']:,} errors · "
                f"{drive['state']} · {'direct' if drive['direct'] else 'buffered'}",
                style=style,
            ),
        )
    earlier = {node["id"]: node for node in before["sessions"]}
    for node in now["sessions"]:
        rate = max(0, node["requests"] - earlier.get(node["id"], node)["requests"]) / seconds
        lines.add_row(f"node {node['id']}", f"{node['name']} · {rate:,.0f}/s asked · holds {node['grants']:,}")
    return Group(lines, Text(""))
