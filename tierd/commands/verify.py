"""`tierd verify STORE`: read every byte of a store and compare checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tierd.commands.progress import ByteProgress
from tierd.sizes import format_bytes, format_problems
from tierd.state import state_directory
from tierd.store.verification import verify_store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(verify)


def verify(
    store: Annotated[Path, typer.Argument(help="Directory of a converted store.", show_default=False)],
    *,
    afresh: Annotated[
        bool, typer.Option("--afresh", help="Read everything, also what an interrupted run has read already.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Read every record, tensor and file of a store; exit 0 if all are right, 1 if not.

    It is safe to stop it: within a day the same command goes on where it stopped, shard by shard.
    """
    with ByteProgress("safe to stop; run again to go on") as bar:
        report = verify_store(
            store, bar.update, notes_folder=state_directory(), max_notes_age=0.0 if afresh else 86400.0
        )
    if as_json:
        print(json.dumps(report.to_table(), indent=1))
    else:
        for problem in report.problems:
            print(f"! {problem}")
        before = f" ({format_bytes(report.bytes_before)} of them by an interrupted run)" if report.bytes_before else ""
        print(
            f"{format_problems(len(report.problems))}: {report.records} experts, "
            f"{report.tensors} dense tensors, {format_bytes(report.bytes_read)} read from {report.store}{before}"
        )
    if not report.ok:
        raise typer.Exit(1)
