"""`tierd fleet`: workers, nodes and an HTTP entrance on a cluster of Ray, brought up, looked at and taken down."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierd.errors import UsageError
from tierd.extras import install_hint
from tierd.fleet.fleet_file import FleetFile, read_fleet
from tierd.fleet.own import begin_own, expect_loopback, find_own, own_file
from tierd.stopping import stopped_by_signals

__all__ = ["register"]

_LOOK_SECONDS = 1.0

File = Annotated[Path, typer.Argument(metavar="FILE", help="The fleet, as TOML.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    fleet = typer.Typer(no_args_is_help=True, help="Nodes and workers on a cluster of Ray; needs the extra `ray`.")
    fleet.command()(up)
    fleet.command()(status)
    fleet.command()(down)
    app.add_typer(fleet, name="fleet")


def up(
    file: File,
    *,
    seconds: Annotated[float, typer.Option(min=0, help="Bound on the wait until all of it serves.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Make a cluster have what FILE says, and wait until all of it serves; exit 1 if it does not.

    What is there already stays, what differs is replaced, what FILE no longer names ends. With a cluster of its own
    (ray = "own") the command stays until Ctrl-C, SIGTERM or `tierd fleet down`, and ends the fleet then;
    Ctrl-C again ends it at once.
    """
    fleet = _read(file)
    own = fleet.ray == "own"
    if own:
        if own_file(fleet).exists():
            raise UsageError(
                f"the fleet {fleet.name} is up already, says {own_file(fleet)}",
                hint="End it with `tierd fleet down FILE`; if it was killed, remove that file.",
            )
        begin_own()
    from tierd.fleet.cluster import joined, own_cluster  # noqa: PLC0415 - Ray takes a second to import
    from tierd.fleet.fleet import bring_up, take_down, wait_until_up  # noqa: PLC0415

    stopped = threading.Event()
    with (
        redirect_stdout(sys.stderr),
        own_cluster(fleet) if own else joined(fleet.ray, namespace=fleet.namespace),
        stopped_by_signals(stopped.set),
    ):
        bring_up(fleet, _tell)
        found = wait_until_up(fleet, seconds, stopped.is_set)
        _show(found, as_json=as_json)
        if own and found["up"]:
            while not stopped.is_set() and own_file(fleet).exists():
                time.sleep(_LOOK_SECONDS)
        if own:
            take_down(fleet, _tell)
    if not found["up"]:
        raise typer.Exit(1)


def status(file: File, *, as_json: Json = False) -> None:
    """Show what each member does; exit 1 unless all serve."""
    fleet = _read(file)
    address = find_own(fleet) if fleet.ray == "own" else fleet.ray
    from tierd.fleet.cluster import joined  # noqa: PLC0415 - Ray takes a second to import
    from tierd.fleet.fleet import fleet_status  # noqa: PLC0415

    with redirect_stdout(sys.stderr), joined(address, namespace=fleet.namespace):
        found = fleet_status(fleet)
    _show(found, as_json=as_json)
    if not found["up"]:
        raise typer.Exit(1)


def down(file: File) -> None:
    """End all that bears the fleet's name; answers under way get a few seconds."""
    fleet = _read(file)
    if fleet.ray == "own":
        find_own(fleet)
        own_file(fleet).unlink(missing_ok=True)  # the command that brought it up sees that, and ends it
        return
    from tierd.fleet.cluster import joined  # noqa: PLC0415 - Ray takes a second to import
    from tierd.fleet.fleet import take_down  # noqa: PLC0415

    with redirect_stdout(sys.stderr), joined(fleet.ray, namespace=fleet.namespace):
        take_down(fleet, _tell)


def _read(file: Path) -> FleetFile:
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("httpx") is None:
        raise UsageError("tierd fleet needs Ray, which is not installed", hint=install_hint("ray"))
    fleet = read_fleet(file)
    expect_loopback(fleet)
    return fleet


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    """On standard output, from which Ray's notices are kept away."""
    if as_json:
        print(json.dumps(found), file=sys.__stdout__, flush=True)
        return
    console = Console(highlight=False, file=sys.__stdout__)
    table = Table("member", "state", "address", "host", "since", box=None)
    for member in found["members"]:
        since = f"{time.time() - member['began']:.0f} s" if member["began"] else ""
        table.add_row(member["name"], member["state"], member["address"], member["host"], since)
    entrance = found["entrance"]
    table.add_row("entrance", "serving" if entrance["answers"] else entrance["state"], entrance["address"], "", "")
    console.print(table)
    for member in found["members"]:
        if member["words"]:
            console.print(f"{member['name']}: {member['words']}", markup=False)


def _tell(line: str) -> None:
    print(f"tierd fleet: {line}", file=sys.stderr, flush=True)
