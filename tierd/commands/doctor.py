"""`tierd doctor STORE`: what is wrong here, and what to do about it."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tierd.doctor.check import Check, Status, summary, worst
from tierd.doctor.examine import examine
from tierd.observe.logs import configure_logs
from tierd.settings import ServeSettings
from tierd.sizes import format_count

__all__ = ["register"]

_EXIT = {Status.OK: 0, Status.REMARK: 1, Status.PROBLEM: 2}
_MARK = {Status.OK: ("✓", "green"), Status.REMARK: ("!", "yellow"), Status.PROBLEM: ("✗", "red")}
_NAME_WIDTH = 14


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(
    store: Annotated[Path, typer.Argument(help="Directory of a converted store.", show_default=False)],
    *,
    mirror: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="A mirror to look at, too. Repeat it for more.")
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Where shards lie that STORE itself lacks.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte of store and mirrors, too.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with the daemon's settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Look at a store, its drives and mirrors, and this host; each finding comes with its remedy.

    Exit 0: all is well. 1: it works, with remarks. 2: there are problems.
    """
    configure_logs("error")
    settings = ServeSettings.load(config=config, table="serve", flags={})
    console = Console(highlight=False, soft_wrap=True)
    checks: list[Check] = []
    for check in examine(store, settings, mirrors=mirror or (), also=also or (), deep=deep):
        if not as_json:
            if check.where != (checks[-1].where if checks else None):
                console.print(check.where or "this host", style="bold", markup=False)
            _tell(console, check)
        checks.append(check)
    status = worst(checks)
    if as_json:
        print(
            json.dumps(
                {"status": summary(checks), "store": str(store), "checks": [check.to_table() for check in checks]},
                indent=1,
                ensure_ascii=False,
            )
        )
    else:
        counts = {kind: sum(check.status is kind for check in checks) for kind in Status}
        console.print(
            f"{format_count(counts[Status.OK], 'check')} passed, {counts[Status.REMARK]} with remarks, "
            f"{format_count(counts[Status.PROBLEM], 'problem')} · exit {_EXIT[status]}"
        )
    if _EXIT[status]:
        raise typer.Exit(_EXIT[status])


def _tell(console: Console, check: Check) -> None:
    mark, colour = _MARK[check.status]
    lines = [check.detail] + ([f"fix: {check.remedy}"] if check.remedy else [])
    if console.is_terminal:
        width = max(40, shutil.get_terminal_size().columns - _NAME_WIDTH - 4)
        lines = [row for line in lines for row in textwrap.wrap(line, width, break_long_words=False)]
    console.print(f"[{colour}]{mark}[/] ", end="")
    console.print(f"{check.name:<{_NAME_WIDTH}} {lines[0]}", markup=False)
    for line in lines[1:]:
        console.print(f"  {'':<{_NAME_WIDTH}} {line}", markup=False)
