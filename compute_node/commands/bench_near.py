"""`compute-node bench near`: two nodes on one daemon, beside one node with twice the batch."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compute_node.bench.geometries import geometry_named
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from tierd.sizes import format_bytes

__all__ = ["near", "register"]


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(near)


def near(
    geometry: Annotated[str, typer.Option("--geometry", help="Of which model.")] = "olmoe-1b-7b",
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of it.")] = 4,
    arena: Annotated[str, typer.Option("--arena", help="RAM for experts: 8GiB, or 50% of them.")] = "100%",
    numerics: Annotated[str, typer.Option("--numerics", help="fast or exact.")] = "exact",
    batch: Annotated[int, typer.Option("--batch", min=1, max=64, help="Texts of each of the two nodes.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each side.")] = 5,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of an answer.")] = 24,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with both raw sides.")] = False,
) -> None:
    """Decode on two nodes that share one daemon and all cores, then kill one in the middle of its work."""
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.near_speed import measure_near  # noqa: PLC0415

    found = measure_near(
        geometry_named(geometry),
        layers=layers,
        arena=arena,
        numerics=numerics,
        batch=batch,
        rounds=rounds,
        tokens=tokens,
        tell=progress_lines(),
    )
    if as_json:
        print_json(found)
    else:
        _show(found)
    if not (found["identical"] and found["survivor_identical"]):
        raise typer.Exit(1)


def _bytes_of(found: dict[str, Any], kind: str) -> list[str]:
    return [format_bytes(share[kind]) for share in found["arena_shares"].values()]


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("figure", "value")
    for name, value in (
        ("two nodes, tokens/s together", f"{found['sum_tokens_per_second']:.3g}"),
        ("one node with twice the batch, tokens/s", f"{found['solo_tokens_per_second']:.3g}"),
        ("share", f"{found['sum_share']:.2f}"),
        ("the arena, once for both", format_bytes(found["arena_bytes"])),
        ("of it in daemon and nodes: seen", ", ".join(_bytes_of(found, "rss_bytes"))),
        ("of it in daemon and nodes: shares", ", ".join(_bytes_of(found, "pss_bytes"))),
        ("each node's own RAM", ", ".join(map(format_bytes, found["node_private_bytes"]))),
        ("the same tokens", "yes" if found["identical"] else "NO"),
        ("the other one's, after one was killed", "the same" if found["survivor_identical"] else "NOT THE SAME"),
    ):
        table.add_row(name, value)
    console.print(table)
    say_void(console, found)
