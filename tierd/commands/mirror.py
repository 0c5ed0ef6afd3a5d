"""`tierd mirror`: copies of a store on other drives."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tierd.addresses import Address
from tierd.client.daemon_mirrors import add_mirror, remove_mirror
from tierd.commands.daemon_name import daemon_address
from tierd.commands.progress import ByteProgress
from tierd.errors import UsageError
from tierd.mirror.directory import check_directory, free_bytes, held_bytes
from tierd.mirror.history import read_uses
from tierd.mirror.pace import Pace
from tierd.mirror.plan import FileKind, MirrorPlan, mirror_files, plan_mirror
from tierd.mirror.stage import stage as stage_mirror
from tierd.mirror.verify import MirrorReport, inspect_mirror
from tierd.service.history import history_path
from tierd.service.mirror_option import parse_mirror
from tierd.settings import ServeSettings
from tierd.sizes import format_bytes, format_problems, format_share, parse_bytes
from tierd.store.pieces import Problem
from tierd.store.store import ExpertStore
from tierd.store.writing import PARTIAL_SUFFIX

__all__ = ["register"]

Store = Annotated[Path, typer.Argument(metavar="STORE", help="Directory of a converted store.", show_default=False)]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of the mirror, on another drive.", show_default=False)
]
Budget = Annotated[str | None, typer.Option(help="Bytes that the mirror may take, such as 100GB. Default: all.")]
Reserve = Annotated[str, typer.Option(help="Bytes to leave free on the mirror's drive.")]
History = Annotated[
    Path | None,
    typer.Option(
        help="Usage counts by flat expert number, .npy or JSON; hottest shards first. Default: what daemons of "
        "this store have recorded."
    ),
]
Also = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Where shards lie that STORE itself lacks. Repeat it for more.")
]
Daemon = Annotated[
    str,
    typer.Argument(metavar="DAEMON", help="unix:PATH, or the directory that a daemon serves.", show_default=False),
]
Rate = Annotated[str | None, typer.Option(help="Bytes per second at most, such as 200MB.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_RESERVE = "1GB"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    mirror = typer.Typer(no_args_is_help=True, help="Plan, make and check copies of a store on other drives.")
    mirror.command()(plan)
    mirror.command()(stage)
    mirror.command()(verify)
    mirror.command()(status)
    mirror.command()(add)
    mirror.command()(remove)
    app.add_typer(mirror, name="mirror")


def plan(
    store: Store,
    directory: Directory,
    *,
    budget: Budget = None,
    reserve: Reserve = _RESERVE,
    history: History = None,
    also: Also = None,
    as_json: Json = False,
) -> None:
    """Say which files a mirror would hold; nothing is written."""
    opened = ExpertStore.open(store, also or ())
    planned = _plan(opened, directory, budget, reserve, history)
    if as_json:
        print(json.dumps(_plan_table(opened, directory, planned), indent=1))
        return
    _tell_plan(planned, directory)
    given = {"--budget": budget, "--reserve": reserve if reserve != _RESERVE else None, "--history": history}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    options += [word for path in also or () for word in ("--also", str(path))]
    print(f"to do it: {shlex.join(['tierd', 'mirror', 'stage', str(store), str(directory), *options])}")


def stage(
    store: Store,
    directory: Directory,
    *,
    budget: Budget = None,
    reserve: Reserve = _RESERVE,
    history: History = None,
    also: Also = None,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """Copy the planned files, checking every record on the way; exit 0 if all are there and good.

    It is safe to stop it: the same command goes on where it stopped. Nothing is written to the store, and nothing is
    deleted; a bad file is replaced only in a directory that says it is a mirror of this store.
    """
    opened = ExpertStore.open(store, also or ())
    planned = _plan(opened, directory, budget, reserve, history)
    if not as_json:
        _tell_plan(planned, directory)
    with ByteProgress("safe to stop; run again to go on") as bar:
        report = stage_mirror(
            opened,
            directory,
            planned,
            reserve=_reserved(reserve),
            pace=Pace(None if rate is None else parse_bytes(rate, option="--rate")),
            progress=bar.update,
        )
    if as_json:
        print(json.dumps(report.to_table(), indent=1))
    else:
        _tell_problems(report.problems)
        print(
            f"{format_problems(len(report.problems))}: {len(report.copied)} files copied "
            f"({format_bytes(report.bytes_copied)}), {len(report.kept)} were there already"
        )
        if report.ok and report.copied:
            command = shlex.join(["tierd", "mirror", "add", str(store), str(directory)])
            print(f"  for a daemon that runs already: {command}")
    if not report.ok:
        raise typer.Exit(1)


def verify(store: Store, directory: Directory, *, rate: Rate = None, as_json: Json = False) -> None:
    """Read every byte of a mirror and compare it with the store's index; exit 0 if nothing is wrong.

    A copy made by hand needs no receipt. `ready`: all expert shards are there and good. `partial`: some are.
    """
    opened = ExpertStore.load(store)
    with ByteProgress() as bar:
        pace = Pace(None if rate is None else parse_bytes(rate, option="--rate"))
        report = inspect_mirror(opened, directory, read=True, pace=pace, progress=bar.update)
    _tell_report(report, {}, as_json=as_json)


def status(store: Store, directory: Directory, *, as_json: Json = False) -> None:
    """Look at lengths and headers of a mirror's files, without reading the experts; exit 0 if nothing is wrong."""
    report = inspect_mirror(ExpertStore.load(store), directory, read=False)
    _tell_report(report, {"free_bytes": free_bytes(directory)}, as_json=as_json)


def add(
    daemon: Daemon,
    directory: Annotated[
        str, typer.Argument(metavar="DIR[=WEIGHT]", help="The mirror, and how much of its bandwidth to count on.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Let a running daemon read from a mirror, too, from now on; one in use is looked at anew, after it was staged."""
    mirror, address = parse_mirror(directory), _unix(daemon)
    drive = asyncio.run(add_mirror(address, mirror.directory, mirror.weight))
    if as_json:
        print(json.dumps({"ok": True, "problems": list(drive["left_out"]), "drive": drive}))
        return
    for problem in drive["left_out"]:
        print(f"! {problem}")
    speed = f", {format_bytes(drive['bandwidth'])}/s" if drive["bandwidth"] else ""
    print(f"{drive['name']} {drive['directory']} · {len(drive['shards'])} of {drive['shards_total']} shards{speed}")
    print(f"  {drive['threads']} reads at a time; {drive['measured']}")


def remove(
    daemon: Daemon,
    name: Annotated[str, typer.Argument(metavar="DIR", help="The mirror's directory, or its name in `tierd stats`.")],
    *,
    as_json: Json = False,
) -> None:
    """Let a running daemon read from a mirror no longer; returns when its last read has ended."""
    address = _unix(daemon)
    given = Path(name).expanduser().absolute()
    removed = asyncio.run(remove_mirror(address, str(given) if given.is_dir() else name))
    print(json.dumps({"ok": True, "problems": [], "name": removed}) if as_json else f"{removed} is no longer read from")


def _unix(daemon: str) -> Address:
    address = daemon_address(daemon, option="DAEMON")
    if address.path is None:
        raise UsageError(
            f"DAEMON: mirrors are added and removed over a Unix socket only, not at {address}",
            hint="Run this on the daemon's host with unix:PATH.",
        )
    return address


def _plan(store: ExpertStore, directory: Path, budget: str | None, reserve: str, history: Path | None) -> MirrorPlan:
    check_directory(store, directory)
    uses = _recorded_uses(store) if history is None else read_uses(history, store.fingerprint)
    files = mirror_files(store.manifest, store.index, uses)
    room = free_bytes(directory) + held_bytes(directory, files, PARTIAL_SUFFIX)
    return plan_mirror(
        files,
        budget=None if budget is None else parse_bytes(budget, option="--budget"),
        room=max(0, room - _reserved(reserve)),
    )


def _recorded_uses(store: ExpertStore) -> np.ndarray | None:
    """What daemons have recorded of this store; None if there is nothing, or nothing good."""
    settings = ServeSettings.load(config=None, table="serve", flags={})
    path = history_path(store.path, store.fingerprint, settings.state_dir)
    if not path.exists():
        return None
    try:
        uses = read_uses(path, store.fingerprint)
    except UsageError as error:
        print(f"{error.message}; shards are taken in their order", file=sys.stderr)
        return None
    return uses if uses.shape == (store.geometry.experts_total,) else None


def _reserved(reserve: str) -> int:
    return 0 if reserve.strip() == "0" else parse_bytes(reserve, option="--reserve")


def _plan_table(store: ExpertStore, directory: Path, planned: MirrorPlan) -> dict[str, Any]:
    return {
        "ok": True,
        "problems": [],
        "store": str(store.path),
        "mirror": str(directory),
        "fingerprint": store.fingerprint,
        "files": [_file_row(file) for file in planned.files],
        "left_out": [_file_row(file) for file in planned.left_out],
        "partial": planned.partial,
        "bytes": planned.nbytes,
        "budget_bytes": planned.budget,
        "room_bytes": planned.room,
        "share_of_uses": planned.share_of_uses,
    }


def _file_row(file: Any) -> dict[str, Any]:
    return {"file": file.name, "bytes": file.nbytes, "kind": file.kind.value, "uses": file.uses}


def _tell_plan(planned: MirrorPlan, directory: Path) -> None:
    shards = sum(file.kind is FileKind.EXPERTS for file in planned.files)
    left = [file for file in planned.left_out if file.kind is FileKind.EXPERTS]
    share = planned.share_of_uses
    used = "" if share is None else f", {format_share(share)} of the recorded uses"
    print(f"{directory}: {shards} of {shards + len(left)} expert shards, {format_bytes(planned.nbytes)} in all{used}")
    if planned.left_out:
        bound = "the budget" if planned.budget is not None and planned.budget <= planned.room else "the drive's room"
        missing = format_bytes(sum(file.nbytes for file in planned.left_out))
        print(f"left out: {len(planned.left_out)} files, {missing}, beyond {bound}; they are read from the store alone")


def _tell_report(report: MirrorReport, more: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_table() | more, indent=1))
    else:
        _tell_problems(report.problems)
        for name in report.missing:
            if all(problem.file != name for problem in report.problems):
                print(f"  not here: {name}")
        read = f", {format_bytes(report.bytes_read)} read" if report.read else ", not read"
        free = f", {format_bytes(more['free_bytes'])} free" if "free_bytes" in more else ""
        print(
            f"{report.state}: {len(report.present)} of {report.shards} expert shards, "
            f"{format_bytes(report.bytes_present)} in {report.mirror}{read}{free}"
        )
        if report.problems or report.unfinished:
            print(f"  to mend it: {shlex.join(['tierd', 'mirror', 'stage', report.store, report.mirror])}")
    if not report.ok:
        raise typer.Exit(1)


def _tell_problems(problems: list[Problem]) -> None:
    for problem in problems:
        print(f"! {problem}")
