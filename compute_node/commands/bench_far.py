"""`compute-node bench far`: a node on another host, by bytes and by worker, beside one on the store's own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compute_node.bench.geometries import geometry_named
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from tierd.sizes import format_bytes

__all__ = ["far", "register"]


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(far)


def far(
    geometry: Annotated[str, typer.Option("--geometry", help="Of which model.")] = "olmoe-1b-7b",
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of it.")] = 4,
    arena: Annotated[str, typer.Option("--arena", help="RAM of the node by bytes: 1GiB, or 25% of experts.")] = "25%",
    numerics: Annotated[str, typer.Option("--numerics", help="fast or exact.")] = "exact",
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each node.")] = 5,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of one turn.")] = 16,
    gigabits: Annotated[float, typer.Option("--gigabits", min=0.001, help="Speed of the link, each way.")] = 1.0,
    delay_ms: Annotated[float, typer.Option("--delay-ms", min=0.0, help="Delay of the link, each way.")] = 1.0,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all turns.")] = False,
) -> None:
    """Decode over a slow link between two network namespaces; needs root, `ip` and `tc`.

    A daemon with all experts in RAM and a worker stand on one side, nodes by bytes and by worker on the other, behind a
    token bucket and a proxy that delays. A node beside the daemon says what the tokens must be.
    """
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.far_speed import measure_far  # noqa: PLC0415

    found = measure_far(
        geometry_named(geometry),
        layers=layers,
        arena=arena,
        numerics=numerics,
        threads=threads,
        rounds=rounds,
        tokens=tokens,
        bits_per_second=int(gigabits * 1e9),
        delay=delay_ms / 1000,
        tell=progress_lines(),
    )
    if as_json:
        print_json(found)
    else:
        _show(found)
    if not found["identical"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    speeds = Table("experts", "tokens/s", "bytes of a token", "embedded: tokens/s", "bytes of a token")
    for side in ("local", "worker", "bytes"):
        cells = []
        for figures in (found, found["embedded"]):
            cells.append(f"{figures[f'{side}_tokens_per_second']:.3g}")
            cells.append(format_bytes(figures[f"{side}_bytes_per_token"]) if side != "local" else "")
        speeds.add_row(side, *cells)
    console.print(speeds)
    budget = found["link_budget"]
    console.print(
        f"{budget['model']} over such a link: {format_bytes(budget['worker_bytes_per_token'])} of a token by worker, "
        f"{format_bytes(budget['bytes_bytes_per_token'])} by bytes",
        markup=False,
    )
    links = Table("Gbit/s", "by worker, tokens/s at most", "by bytes")
    for row in budget["tokens_per_second"]:
        by_bytes = "" if row["bytes"] is None else f"{row['bytes']:.3g}"
        links.add_row(f"{row['gigabits_per_second']}", f"{row['worker']:.3g}", by_bytes)
    console.print(links)
    console.print(
        "\nA store's host with 16 cores, 25 Gbit/s and drives of 3 GB/s, simulated with these figures, whole model:"
    )
    fleet = Table("nodes by worker", "tokens/s of each on one host", "what limits", "hosts for 80 % of a lone node's")
    for row in found["fleet"]:
        fleet.add_row(
            f"{row['nodes']:,}", f"{row['tokens_per_second']:.3g}", row["limit"], str(row["hosts_for_80_percent"])
        )
    console.print(fleet)
    console.print("the tokens are the same" if found["identical"] else "THE TOKENS DIFFER")
    say_void(console, found)
