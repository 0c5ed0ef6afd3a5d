"""`compute-node bench decode`: tokens per second with the experts on the drive, and how near that is to its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compute_node.bench.geometries import geometry_named
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from compute_node.commands.bench_speed import Experts, check_formats
from compute_node.engine.cores import default_threads
from tierd.errors import UsageError
from tierd.sizes import format_bytes

__all__ = ["decode", "register"]

PREFETCH = ("off", "on", "auto")


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(decode)


def decode(
    geometry: Annotated[str, typer.Option("--geometry", help="Of which model.")] = "glm-5.2",
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of it.")] = 4,
    experts: Annotated[int | None, typer.Option("--experts", help="Routed experts of a layer. Default: all.")] = 128,
    experts_format: Experts = "int4-g64",
    arena: Annotated[str, typer.Option("--arena", help="RAM for experts: 8GiB, or 25% of them.")] = "25%",
    numerics: Annotated[str, typer.Option("--numerics", help="fast or exact.")] = "fast",
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of decoding and of the probe.")] = 7,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of one turn.")] = 12,
    prefetch: Annotated[
        str, typer.Option("--prefetch", help="off; or on or auto: turns with hints, too, beside those without.")
    ] = "off",
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Chrome trace of the last ten seconds of the run, for perfetto.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with both raw sides.")] = False,
) -> None:
    """Decode with experts on the drive. The store (10 GB by default) is made once, in the user's cache."""
    if prefetch not in PREFETCH:
        raise UsageError(f"unknown prefetch {prefetch!r}", hint=f"Known: {', '.join(PREFETCH)}.")
    check_formats(experts_format)
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.decode_limit import decode_limit  # noqa: PLC0415
    from compute_node.bench.decode_speed import measure_decode  # noqa: PLC0415
    from compute_node.bench.memory_bandwidth import memory_bandwidth  # noqa: PLC0415
    from compute_node.bench.random_store import random_store  # noqa: PLC0415

    sizes_of, progress = geometry_named(geometry), progress_lines()
    random_store(sizes_of, layers=layers, experts=experts, experts_format=experts_format, tell=progress)
    found = measure_decode(
        sizes_of,
        layers=layers,
        experts=experts,
        experts_format=experts_format,
        arena=arena,
        threads=threads,
        numerics=numerics,
        rounds=rounds,
        tokens=tokens,
        prefetch=prefetch,
        timeline=timeline,
        tell=progress,
    )
    if (memory := memory_bandwidth(threads or default_threads())) is not None:
        found["memory_bytes_per_second"] = memory
        sizes = {"tokens": tokens, "record_bytes": found["record_bytes"], "bytes_per_token": found["bytes_per_token"]}
        for side in filter(None, (found, found.get("without_prefetch"))):
            side.update(decode_limit(side["turns"], **sizes, memory=memory))
    if as_json:
        print_json(found)
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("figure", "value")
    waited = {name: sum(turn["wait_by_outcome"][name] for turn in found["turns"]) for name in ("miss", "joined", "hit")}
    for name, value in (
        ("tokens/s", f"{found['tokens_per_second']:.2f}"),
        ("projected to the whole model, tokens/s", f"{found['projected_tokens_per_second']:.3f}"),
        ("experts found in RAM", f"{100 * (found['hit_rate'] or 0):.1f} %"),
        ("demanded misses, GB/s", f"{found['missed_bytes_per_second'] / 1e9:.2f}"),
        ("the drive's probe, GB/s", f"{found['probe_bytes_per_second'] / 1e9:.2f}"),
        ("share of the drive", f"{found['drive_share']:.2f}"),
        *(
            [
                (f"limit by the {found['limit_by']}, tokens/s", f"{found['limit_tokens_per_second']:.2f}"),
                ("share of the limit", f"{found['limit_share']:.2f}"),
            ]
            if "limit_share" in found
            else []
        ),
        ("time that waited for experts", f"{100 * found['wait_share']:.0f} %"),
        *(
            [
                ("tokens/s without hints", f"{found['without_prefetch']['tokens_per_second']:.2f}"),
                ("share of the drive without hints", f"{found['without_prefetch']['drive_share']:.2f}"),
            ]
            if "without_prefetch" in found
            else []
        ),
        ("waited, s", ", ".join(f"{name} {value:.2f}" for name, value in waited.items())),
        ("weights of a token", format_bytes(found["bytes_per_token"])),
    ):
        table.add_row(name, value)
    console.print(table)
    if found["note"]:
        console.print(found["note"], style="dim", markup=False)
    say_void(console, found)
