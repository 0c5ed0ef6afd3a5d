"""`compute-node bench arena`: does a daemon's arena cost a resident model anything?"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import typer
from rich.console import Console

from compute_node.bench.geometries import geometry_named
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from tierd.sizes import format_share

__all__ = ["arena", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the group."""
    app.command("arena")(arena)


def arena(
    geometry: Annotated[str, typer.Option("--geometry", help="olmoe-1b-7b or another.")] = "olmoe-1b-7b",
    layers: Annotated[int, typer.Option(help="Layers of it; each of olmoe-1b-7b takes 0.7 GB of RAM.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, max=4000, help="Tokens of each run.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each side, alternating.")] = 5,
    threads: options.Threads = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Compare a model whose experts lie in a daemon's arena with the same one in the node's own memory.

    Random weights in a real model's sizes, all experts resident, the sides alternating, logits compared bit for bit.
    """
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.arena import measure_arena  # noqa: PLC0415
    from compute_node.bench.random_store import random_store  # noqa: PLC0415

    progress = progress_lines()
    sizes = geometry_named(geometry)
    progress(f"store with the sizes of {sizes.name}, {layers} of {sizes.layers} layers")
    store = random_store(sizes, layers=layers)
    report = measure_arena(store, tokens=tokens, rounds=rounds, threads=threads, progress=progress)
    report["geometry"] = sizes.name
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    speeds, pages = report["tokens_per_second"], report["huge_page_share"]

    def side(name: str) -> str:
        runs = speeds[name]
        return (
            f"{statistics.median(runs):.1f} tok/s ({min(runs):.1f} to {max(runs):.1f}), "
            f"{format_share(pages[name])} of it on 2 MiB pages"
        )

    lookup, two = report["seconds_per_resident_expert"], report["two_nodes"]
    for line in (
        f"through the daemon    {side('through_daemon')}",
        f"in the node's memory  {side('in_process')}",
        f"the same on 4 KiB     {side('in_process_4k')}",
        f"ratio                 {report['through_daemon_ratio']:.3f}; 4 KiB pages {report['small_pages_ratio']:.3f}",
        "a resident expert     "
        + ("asked for by message" if lookup is None else f"{1e9 * lookup:.0f} ns to find and count"),
        f"messages per token    {report['rpcs_per_token']:g}",
        f"thrown away           {two['discarded']:,} of {two['unasked']:,} unasked uses by two nodes at 50 %",
    ):
        console.print(line, markup=False, soft_wrap=True)
    say_void(console, report)
