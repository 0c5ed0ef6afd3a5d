"""`tierd ctl`: change a running daemon, or look into it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierd.client.daemon_control import set_pins, set_ram
from tierd.client.daemon_dump import fetch_dump
from tierd.commands.daemon_name import daemon_address
from tierd.errors import UsageError
from tierd.sizes import format_bytes, format_count

__all__ = ["register"]

_AMOUNT = re.compile(r"([0-9.]+ [kMGT]?B) (.*)")
"""A line of the sum: what a part of the daemon takes."""

Daemon = Annotated[
    str,
    typer.Argument(metavar="DAEMON", help="unix:PATH, HOST:PORT, or the directory that a daemon serves."),
]
Layer = Annotated[int, typer.Argument(min=0, help="Layer number.", show_default=False)]
Experts = Annotated[
    list[int] | None, typer.Argument(min=0, help="Expert numbers; without any, the whole layer.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    ctl = typer.Typer(no_args_is_help=True, help="Change a running daemon, or look into it.")
    ctl.command()(ram)
    ctl.command()(pin)
    ctl.command()(unpin)
    ctl.command()(dump)
    app.add_typer(ctl, name="ctl")


def ram(
    amount: Annotated[
        str, typer.Argument(metavar="RAM", help="96GiB, 75% of what the daemon may have, or auto.", show_default=False)
    ],
    daemon: Daemon,
    *,
    as_json: Json = False,
) -> None:
    """Give a daemon more or less memory, now and without a break; exit 1 if experts in use hold some of it back."""
    answer = asyncio.run(set_ram(daemon_address(daemon, option="DAEMON"), amount))
    if as_json:
        print(json.dumps(answer))
    else:
        for line in answer["lines"]:
            part = _AMOUNT.match(line)
            print(f"  {part[1]:>9}  {part[2]}" if part else f"  {line}")
        print(
            f"arena {answer['slots_before']:,} → {answer['slots']:,} experts ({format_bytes(answer['arena_bytes'])}); "
            f"the daemon may have {format_bytes(answer['ram_bytes'])}"
        )
        if not answer["settled"]:
            print("! sessions still hold experts beyond that; the memory goes back when they let go")
    if not answer["settled"]:
        raise typer.Exit(1)


def pin(daemon: Daemon, layer: Layer, experts: Experts = None, *, as_json: Json = False) -> None:
    """Keep experts in RAM once they are there, for as long as the daemon runs; those missing are read in the lulls."""
    _pin(daemon, layer, experts, pinned=True, as_json=as_json)


def unpin(daemon: Daemon, layer: Layer, experts: Experts = None, *, as_json: Json = False) -> None:
    """Leave experts to the policy again."""
    _pin(daemon, layer, experts, pinned=False, as_json=as_json)


def dump(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where the trace goes; - for standard output.", show_default=False)
    ],
    daemon: Daemon,
    *,
    seconds: Annotated[float, typer.Option(help="How far back, at most 10.", min=0.001, max=10.0)] = 10.0,
) -> None:
    """Write what a daemon did in the last seconds as a Chrome trace, to open at ui.perfetto.dev or chrome://tracing."""
    trace = asyncio.run(fetch_dump(daemon_address(daemon, option="DAEMON"), seconds))
    if str(file) == "-":
        sys.stdout.buffer.write(trace)
        return
    try:
        file.write_bytes(trace)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", hint="Name a file in a folder that you may write to.") from error
    told = json.loads(trace)["otherData"]
    print(f"{file}: {told['events']:,} events of the last {told['seconds']:g} s, {format_bytes(len(trace))}")


def _pin(daemon: str, layer: int, experts: list[int] | None, *, pinned: bool, as_json: bool) -> None:
    count = asyncio.run(set_pins(daemon_address(daemon, option="DAEMON"), layer, experts or [], pinned=pinned))
    print(
        json.dumps({"pinned": count})
        if as_json
        else f"{format_count(count, 'expert')} {'is' if count == 1 else 'are'} pinned"
    )
