"""`tierd scrub`: read a directory's copies, or all of a running daemon's, again; mend them on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.addresses import Address, parse_address
from tierd.client.daemon_scrub import watch_scrub
from tierd.commands.progress import ByteProgress
from tierd.errors import UsageError
from tierd.mirror.pace import Pace
from tierd.mirror.receipt import read_receipt
from tierd.mirror.scrub import scrub as scrub_directory
from tierd.sizes import format_bytes, format_problems, parse_bytes
from tierd.store.manifest import INDEX_FILE, MANIFEST_FILE
from tierd.store.store import ExpertStore

__all__ = ["register"]

_LOWEST_PRIORITY = 19
_DEFAULT_RATE = "200MB"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(scrub)


def scrub(
    target: Annotated[
        str,
        typer.Argument(metavar="DIR|DAEMON", help="A store, a mirror, or unix:PATH of a daemon.", show_default=False),
    ],
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Write what is bad in DIR again from good copies.")] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="DIR", help="Where good copies may be; default: what a mirror was staged from."),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Bytes per second at most. Default: 200MB.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Read every record again at low priority; exit 0 if all are right, 1 if not.

    Given a daemon, that reads all its drives, behind every read that a node waits for; records found bad are read from
    other drives from then on. Nothing is written, except to DIR and with --repair.
    """
    if target.startswith("unix:"):
        if repair or source:
            raise UsageError("--repair and --from go with a directory, not with a daemon")
        _scrub_daemon(parse_address(target, option="DAEMON"), rate, as_json=as_json)
        return
    if not target:
        raise UsageError("DIR is empty", hint="Name a store, a mirror, or unix:PATH of a daemon.")
    _scrub_directory(Path(target), source, rate, repair=repair, as_json=as_json)


def _scrub_directory(
    directory: Path, given: list[Path] | None, rate: str | None, *, repair: bool, as_json: bool
) -> None:
    if given and not repair:
        raise UsageError("--from goes with --repair")
    store, sources = _reference(directory, given or [])
    if repair and not sources:
        raise UsageError(
            f"--repair: {directory} does not say where good copies are", hint="Name a directory with them: --from DIR."
        )
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    with ByteProgress() as bar:
        report = scrub_directory(
            store,
            directory,
            sources=sources if repair else None,
            pace=Pace(parse_bytes(rate or _DEFAULT_RATE, option="--rate")),
            progress=bar.update,
        )
    if as_json:
        print(json.dumps(report.to_table(), indent=1))
    else:
        for problem in report.repaired:
            print(f"repaired: {problem}")
        for problem in report.problems:
            print(f"! {problem}")
        print(
            f"{format_problems(len(report.problems))}: {report.records} experts in {report.shards} shards, "
            f"{format_bytes(report.bytes_read)} read from {directory}"
            + (f", {len(report.repaired)} repaired" if repair else "")
        )
        if report.replaced:
            print("  a running daemon takes up what was replaced when the mirror is removed and added again")
        if report.problems and not repair:
            command = shlex.join(["tierd", "scrub", "--repair", str(directory)])
            print(f"  to repair it: {command}" + ("" if sources else " --from DIR"))
    if not report.ok:
        raise typer.Exit(1)


def _reference(directory: Path, given: list[Path]) -> tuple[ExpertStore, list[Path]]:
    """The store whose bytes the directory should have, and where good copies may be."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="A daemon is named unix:PATH.")
    receipt = read_receipt(directory)
    staged_from = Path(receipt.source) if receipt is not None else None
    sources = given or [path for path in (staged_from,) if path is not None and path.is_dir()]
    for folder in (directory, *sources):
        if (folder / MANIFEST_FILE).exists() and (folder / INDEX_FILE).exists():
            return ExpertStore.load(folder), sources
    raise UsageError(
        f"{directory} holds no {MANIFEST_FILE} with {INDEX_FILE}, so nothing says what its bytes should be",
        hint="Give the store with --repair --from STORE, or use `tierd mirror verify STORE DIR`.",
    )


def _scrub_daemon(address: Address, rate: str | None, *, as_json: bool) -> None:
    found, last = asyncio.run(_watch(address, 0 if rate is None else parse_bytes(rate, option="--rate")))
    if as_json:
        print(json.dumps({"ok": not found, "problems": found, **last}, indent=1))
    else:
        for problem in found:
            expert = "" if problem["layer"] is None else f"layer {problem['layer']} expert {problem['expert']}: "
            print(f"! {problem['drive']} {problem['file']}: {expert}{problem['reason']}")
        print(
            f"{format_problems(len(found))}: {last['records']} records, "
            f"{format_bytes(last['bytes_read'])} read by {address}"
        )
    if found:
        raise typer.Exit(1)


async def _watch(address: Address, rate: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    found: list[dict[str, Any]] = []
    last: dict[str, Any] = {"records": 0, "bytes_read": 0}
    with ByteProgress("safe to stop") as bar:
        async for message in watch_scrub(address, rate):
            found += [
                {
                    "drive": problem.drive,
                    "file": problem.file,
                    "reason": problem.reason,
                    "layer": problem.layer if problem.HasField("layer") else None,
                    "expert": problem.expert if problem.HasField("expert") else None,
                    "offset": problem.offset,
                    "bytes": problem.bytes,
                }
                for problem in message.problems
            ]
            last = {"records": message.records, "bytes_read": message.bytes_done}
            bar.update(message.bytes_done, message.bytes_total, f"{message.drive} {message.file}")
    return found, last
