"""`tierd plan`: what a model needs, and what fits, before anything is converted or started."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierd.checkpoint.outlook import Outlook, look_ahead
from tierd.commands.plan_figures import DriveSpeed, Prediction, RamRow, format_figures, predict, ram_rows
from tierd.commands.plan_speed import MeasuredRun, load_run
from tierd.devices.probe import DEFAULT_DEPTH
from tierd.errors import UsageError
from tierd.memory_limits import group_limits, host_memory
from tierd.policy.trace import Trace, load_trace
from tierd.service.budget import AUTO, DaemonFacts, choose_ram, fixed_items, plan_budget
from tierd.service.drives import Drives
from tierd.service.ram import facts_of
from tierd.settings import ServeSettings
from tierd.sizes import format_bytes, format_count, format_share
from tierd.store.formats import ExpertFormat
from tierd.store.geometry import Geometry
from tierd.store.manifest import CONFIG_FILE, MANIFEST_FILE
from tierd.store.store import ExpertStore
from tierd.terminal import show, show_hanging, wide_console

__all__ = ["register"]

_INDENT = 21
"""Columns before the figures of a part of the model."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(plan)


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="STORE", help="A store, or a published checkpoint: its config.json is enough.", show_default=False
        ),
    ],
    *,
    ram: Annotated[
        str,
        typer.Option(
            help="As for serve: 96GiB, 75% of what this host allows, or auto. More than that plans for another one."
        ),
    ] = AUTO,
    experts: Annotated[
        ExpertFormat | None, typer.Option(help="Of a checkpoint: the format that its experts would have.")
    ] = None,
    dst: Annotated[
        Path | None, typer.Option(help="Of a checkpoint: where the store would be. Default: beside it.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Routing of this model; predicts hit rates by replaying it.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Replay only so many tokens of the trace.")] = 2000,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            help="What compute-node generate STORE --json printed, on this host, of a text like the trace's; with "
            "--trace it predicts tokens/s. Best are two, with little and with much RAM. Repeat it for more."
        ),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, max=4096, help="Compute nodes at once, as for serve.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Say what a model needs of disk and memory, what a daemon would do with RAM, and what that would bring.

    `auto` is the least of what the host has left and what each control group has left, minus a reserve; the sum is
    shown line by line.
    """
    if measured and trace is None:
        raise UsageError("--measured goes with --trace", hint="compute-node generate STORE --trace FILE records one.")
    settings = ServeSettings.load(config=None, table="serve", flags={"max_sessions": max_sessions})
    routing = None if trace is None else load_trace(trace)
    if routing is not None:
        routing = routing.head(tokens)
    if (model / MANIFEST_FILE).exists():
        store = ExpertStore.open(model)
        runs = [load_run(path, store.fingerprint) for path in measured or []]
        answer = _of_store(store, settings, ram, routing, runs)
    elif not (model / CONFIG_FILE).exists():
        raise UsageError(f"{model}: neither a store nor a checkpoint: it has no {MANIFEST_FILE} and no {CONFIG_FILE}")
    elif measured:
        raise UsageError("--measured goes with a store, not with a checkpoint")
    else:
        answer = _of_checkpoint(model, settings, ram, experts, dst, routing)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        _tell(answer)


def _of_store(
    store: ExpertStore, settings: ServeSettings, ram: str, trace: Trace | None, runs: list[MeasuredRun]
) -> dict[str, Any]:
    drives = Drives(store, settings)
    speed = None
    if trace is not None:
        # A daemon that is told how many reads to have in flight measures nothing; a prediction has to.
        measured = Drives(store, settings.model_copy(update={"drive_threads": None}))
        asyncio.run(measured.measure())
        found = [info.probe.bandwidth for info in measured.info.values() if info.shards and info.probe.bandwidth]
        speed = DriveSpeed(len(found), sum(found)) if found else None
    facts = facts_of(store, settings, drives.spares)
    forecast = _forecast(store.geometry, trace, speed, runs)
    dense = store.manifest.dense_bytes
    return {
        "model": str(store.path),
        "kind": "store",
        "family": store.manifest.family or "synthetic",
        **_shape(store.geometry),
        "dense": {store.manifest.dense_format: dense},
        "formats": {store.manifest.expert_format: format_figures(store.geometry)},
        "bandwidth": speed.bandwidth if speed else None,
        "drives": speed.drives if speed else None,
        **_memory(facts, ram, dense, trace, forecast),
    }


def _of_checkpoint(
    folder: Path,
    settings: ServeSettings,
    ram: str,
    experts: ExpertFormat | None,
    dst: Path | None,
    trace: Trace | None,
) -> dict[str, Any]:
    outlook = look_ahead(folder)
    chosen = experts or outlook.native or ExpertFormat.INT4_G64
    if chosen not in outlook.geometry:
        known = ", ".join(outlook.geometry)
        raise UsageError(f"--experts {chosen}: {folder} is not published in that format", hint=f"Choose from {known}.")
    geometry = outlook.geometry[chosen]
    spares = DEFAULT_DEPTH + 1  # as long as no drive has been measured
    facts = DaemonFacts(geometry.experts_total, geometry.slot_bytes, geometry.top_k, spares, settings.max_sessions)
    dense = min(outlook.dense_bytes.values())
    return {
        "model": str(folder),
        "kind": "checkpoint",
        "family": outlook.family,
        **_shape(geometry),
        "dense": {str(fmt): nbytes for fmt, nbytes in outlook.dense_bytes.items()},
        "formats": {str(fmt): format_figures(made) for fmt, made in outlook.geometry.items()},
        "disk": _disk(outlook, chosen, dst if dst is not None else folder.absolute().parent),
        "bandwidth": None,
        "drives": None,
        **_memory(facts, ram, dense, trace, _forecast(geometry, trace, None, [])),
    }


def _shape(geometry: Geometry) -> dict[str, Any]:
    return {
        "layers": len(geometry.layers),
        "experts": geometry.experts_total,
        "top_k": geometry.top_k,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
    }


def _disk(outlook: Outlook, chosen: ExpertFormat, place: Path) -> dict[str, Any]:
    """What a conversion writes, against what is free where it would go."""
    while not place.exists() and place != place.parent:
        place = place.parent
    needed = outlook.geometry[chosen].expert_bytes + max(outlook.dense_bytes.values())
    return {
        "format": str(chosen),
        "needed_bytes": needed,
        "free_bytes": shutil.disk_usage(place).free,
        "at": str(place),
    }


def _forecast(
    geometry: Geometry, trace: Trace | None, speed: DriveSpeed | None, runs: list[MeasuredRun]
) -> Callable[[list[RamRow]], Prediction]:
    """Adds to rows what the trace says of them, where there is one."""
    if trace is None:
        return lambda rows: Prediction(rows, None)
    return lambda rows: predict(rows, trace, geometry, speed=speed, runs=runs)


def _memory(
    facts: DaemonFacts, ram: str, dense: int, trace: Trace | None, forecast: Callable[[list[RamRow]], Prediction]
) -> dict[str, Any]:
    choice = choose_ram(ram, host_memory(), group_limits(), dense_bytes=dense, elsewhere=True)
    problem, budget = "", None
    try:
        budget = plan_budget(choice.nbytes, facts)
    except UsageError as error:
        if ram.strip().lower() != AUTO:
            raise
        problem = error.message
    prediction = forecast(ram_rows(facts, [choice.nbytes]))
    items = budget.items if budget is not None else fixed_items(facts)
    return {
        "ram": {
            "asked": ram,
            "bytes": choice.nbytes,
            "how": list(choice.lines),
            "items": [{"name": item.name, "bytes": item.nbytes} for item in items],
            "slots": budget.slots if budget is not None else 0,
            "share": budget.slots / facts.experts if budget is not None else 0.0,
            "least_bytes": sum(item.nbytes for item in fixed_items(facts)) + facts.top_k * facts.slot_bytes,
            "problem": problem,
        },
        "sizes": [dataclasses.asdict(row) for row in prediction.rows],
        "node": dataclasses.asdict(prediction.node) if prediction.node is not None else None,
        "trace": None if trace is None else trace.name,
    }


def _tell(answer: dict[str, Any]) -> None:
    console = wide_console()
    console.print(
        f"{answer['model']} · {answer['family']} · {format_count(answer['layers'], 'layer')}, "
        f"{answer['experts']:,} routed experts, "
        f"top-{answer['top_k']}",
        soft_wrap=True,
    )
    dense = ", ".join(f"{format_bytes(nbytes)} at {fmt}" for fmt, nbytes in answer["dense"].items())
    show_hanging(console, f"  {'dense part':<18} {dense}: in the memory of each compute node", indent=_INDENT)
    for fmt, figures in answer["formats"].items():
        waste = f", {format_bytes(figures['wasted_bytes'])} wasted by one slot size" if figures["wasted_bytes"] else ""
        show_hanging(
            console,
            f"  {f'experts {fmt}':<18} {format_bytes(figures['expert_bytes'])} on disk · a token touches "
            f"{format_bytes(figures['token_bytes'])} · a slot takes {format_bytes(figures['slot_bytes'])}{waste}",
            indent=_INDENT,
        )
    ram = answer["ram"]
    console.print("\nmemory of the daemon", soft_wrap=True)
    for line in ram["how"]:
        show_hanging(console, f"  {line}", indent=4)
    for item in ram["items"]:
        console.print(f"  {format_bytes(item['bytes']):>9}  {item['name']}", soft_wrap=True)
    if ram["problem"]:
        show_hanging(console, f"! {ram['problem']}", indent=2)
    else:
        console.print(f"  {ram['slots']:,} of {answer['experts']:,} experts fit ({format_share(ram['share'])})")
    _tell_sizes(console, answer)
    disk = answer.get("disk")
    if disk is not None and disk["needed_bytes"] > disk["free_bytes"]:
        short = disk["needed_bytes"] - disk["free_bytes"]
        console.print(
            f"\nShort of {format_bytes(short)} of disk at {disk['at']}: {disk['format']} needs "
            f"{format_bytes(disk['needed_bytes'])}, {format_bytes(disk['free_bytes'])} are free. "
            "Use --consume to free source shards as they are converted.",
            soft_wrap=True,
        )


def _tell_sizes(console: Console, answer: dict[str, Any]) -> None:
    traced, node = answer["trace"] is not None, answer["node"]
    speed = "tok/s" if node else "tok/s at most"
    table = Table(box=None, padding=(0, 2))
    titles = ("hit rate", "read per token", speed, "+1 drive") if traced else ()
    for title in ("RAM", "experts", "share", *titles):
        table.add_column(title, justify="right")
    for size in answer["sizes"]:
        row = RamRow(**size)
        cells = [format_bytes(row.ram), f"{row.slots:,}", format_share(row.share)]
        if row.hit_rate is not None and row.read_bytes is not None:
            rates = (row.tokens_per_second, row.tokens_per_second_with_another_drive)
            cells += [format_share(row.hit_rate, digits=1), format_bytes(row.read_bytes)]
            cells += ["" if rate is None else f"{rate:.3g}" for rate in rates]
        table.add_row(*cells)
    console.print()
    show(console, table)
    if traced:
        print("  hit rates are those of the trace's routing, begun cold; your text decides.")
    if node:
        compute, message, expert = (1e3 * node[f"{part}_seconds"] for part in ("compute", "message", "expert"))
        print(f"  by the measured runs a step computes for {compute:,.2f} ms; a layer that lacks experts takes")
        print(f"  {message:+,.2f} ms, {expert:,.2f} ms for each of them, and the time of its reads from the drives.")
    elif traced:
        print("  tok/s are what the drives alone allow, at the bandwidth that was measured; see --measured.")
