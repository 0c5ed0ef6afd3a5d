"""`tierd bench drives`: how much of a drive's speed reaches a client of the daemon."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierd.commands.bench_observe import observe
from tierd.commands.bench_transformers import transformers
from tierd.drivebench.fio import fio_path
from tierd.drivebench.measure import SIZES, Effort, against_fio, against_throttle, cold_store, several_drives
from tierd.drivebench.noise import OtherWork
from tierd.sizes import format_bytes
from tierd.state import cache_directory
from tierd.store.store import ExpertStore

__all__ = ["register"]

_QUICK = Effort(slices=4, seconds=0.2, request_bytes=8 << 20, together=1)
_PARTS = ("fio", "throttle", "several")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    bench = typer.Typer(no_args_is_help=True, help="Measure; the machine should be quiet meanwhile.")
    bench.command()(drives)
    bench.command()(observe)
    bench.command()(transformers)
    app.add_typer(bench, name="bench")


def drives(
    store: Annotated[
        Path | None, typer.Argument(help="A store to measure; without it, three are made and removed.")
    ] = None,
    *,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where stores are made: on the drive in question.")
    ] = None,
    slices: Annotated[int, typer.Option(min=1, help="Pairs of slices.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.05, max=60.0, help="Length of a slice.")] = 0.5,
    only: Annotated[list[str] | None, typer.Option(help="fio, throttle or several; repeat it. Default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few short slices of small stores: a trial.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Compare cold reads through a real daemon with fio, with a throttle, and with more drives.

    A client asks the daemon for whole layers that are not in RAM; fio reads the same file with the same block size
    and depth. Both are measured in alternating slices; a ratio is the median over the pairs.
    """
    parts = _chosen(only)
    where = folder if folder is not None else cache_directory() / "bench"
    console = Console(stderr=True, highlight=False)
    effort = replace(_QUICK if quick else Effort(slices, seconds), say=console.print)
    others = OtherWork()
    answer: dict[str, Any] = {
        "ratio_to_fio": dict.fromkeys(SIZES),
        "ratio_to_throttle": None,
        "two_drives_ratio": None,
        "slow_third_ratio": None,
        "slices": effort.slices,
        "slice_seconds": effort.seconds,
        "notes": [],
        "details": {},
    }
    if "fio" in parts:
        if fio_path() is None:
            answer["notes"].append("fio is not installed: nothing to compare the drive's own speed with")
        else:
            _measure_fio(store, where, effort, answer)
    if "throttle" in parts:
        effort.say("behind a throttle of 2 GB/s")
        answer["details"]["throttle"] = measured = against_throttle(where, effort)
        answer["ratio_to_throttle"] = measured["median"]
    if "several" in parts:
        effort.say("two throttled drives, and a slow third one")
        two, three = several_drives(where, effort)
        answer["details"] |= {"two_drives": two, "slow_third": three}
        answer["two_drives_ratio"], answer["slow_third_ratio"] = two["median"], three["median"]
    others.judge(answer)
    if as_json:
        print(json.dumps(answer, indent=1, ensure_ascii=False))
    else:
        _show(answer)


def _measure_fio(store: Path | None, where: Path, effort: Effort, answer: dict[str, Any]) -> None:
    if store is not None:
        opened = ExpertStore.open(store)
        record = opened.geometry.slot_bytes
        name = next((name for name, nbytes in SIZES.items() if nbytes == record), format_bytes(record))
        effort.say(f"records of {name} against fio, in {store}")
        _note(name, against_fio(opened, effort), answer)
        return
    for name, nbytes in SIZES.items():
        effort.say(f"records of {name} against fio, in {where}")
        with cold_store(where, nbytes, effort.asked_bytes(nbytes)) as made:
            _note(name, against_fio(made, effort), answer)


def _note(name: str, measured: dict[str, Any] | None, answer: dict[str, Any]) -> None:
    answer["ratio_to_fio"][name] = None if measured is None else measured["median"]
    answer["details"][f"fio {name}"] = measured


def _chosen(only: list[str] | None) -> list[str]:
    for part in only or ():
        if part not in _PARTS:
            raise typer.BadParameter(f"{part} is none of {', '.join(_PARTS)}", param_hint="--only")
    return list(only or _PARTS)


def _show(answer: dict[str, Any]) -> None:
    table = Table(title=f"cold reads, medians of {answer['slices']} pairs of {answer['slice_seconds']:g} s")
    for column in ("what", "ratio", "quartiles", "ours", "theirs", "CPU s/GB"):
        table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for name, measured in answer["details"].items():
        if measured is None:
            continue
        ours, theirs = (_middle(value) for value in measured.values() if isinstance(value, list))
        cost = measured.get("daemon_cpu_seconds_per_gb")
        table.add_row(
            name,
            f"{measured['median']:.3f}",
            f"{measured['lower_quartile']:.3f}-{measured['upper_quartile']:.3f}",
            f"{format_bytes(ours)}/s",
            f"{format_bytes(theirs)}/s",
            "" if cost is None else f"{cost:.2f}",
        )
    Console(highlight=False).print(table)
    for note in answer["notes"]:
        print(note, file=sys.stderr)


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
