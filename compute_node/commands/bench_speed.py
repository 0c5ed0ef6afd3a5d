"""`compute-node bench kernels`, `step`, `costs` and `prefill`: what they reach of what the machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from compute_node.bench.geometries import GEOMETRIES, geometry_named
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from tierd.errors import UsageError
from tierd.sizes import format_bytes
from tierd.store.formats import ExpertFormat

__all__ = ["Experts", "check_formats", "register"]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object with both raw sides.")]
ReadMebibytes = Annotated[int, typer.Option("--read-mib", min=1, help="Memory that is read plainly.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Alternating runs of each side.")]
Geometry = Annotated[str, typer.Option("--geometry", help=f"{', '.join(GEOMETRIES)}.")]
Layers = Annotated[int | None, typer.Option("--layers", help="Layers of it. Default: all.")]
_EXPERTS = tuple(str(name) for name in ExpertFormat if name is not ExpertFormat.F32)
Experts = Annotated[str, typer.Option("--experts-format", help=f"{', '.join(_EXPERTS)}.")]
Numerics = Annotated[str, typer.Option("--numerics", help="fast or exact.")]

_MATRIX_BYTES = 300 << 20
_CACHES = 8
"""Matrices are so many times as large as all caches of the last level: else a cache would be measured."""
_CONTEXTS = (64, 512, 4000)
_BATCHES = (1, 4, 16)


def register(group: typer.Typer) -> None:
    """Adds the commands to the group `bench`."""
    for command in (kernels, step, costs, prefill):
        group.command()(command)


def kernels(
    threads: options.Threads = None,
    cols: Annotated[int, typer.Option("--cols", min=64, help="Inputs of the matrices.")] = 2048,
    mebibytes: Annotated[
        int | None,
        typer.Option("--matrix-mib", min=1, help="Size of the matrices. Default: 300, or 8 times the caches."),
    ] = None,
    read_mebibytes: ReadMebibytes = 1024,
    rounds: Rounds = 9,
    *,
    as_json: AsJson = False,
) -> None:
    """Matrix-vector products beside plain reading of memory."""
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.kernel_speed import measure_kernels  # noqa: PLC0415
    from compute_node.bench.memory_bandwidth import cache_bytes  # noqa: PLC0415

    console, tell = Console(highlight=False), progress_lines()
    cached = cache_bytes()
    speeds, facts = measure_kernels(
        threads=threads,
        matrix_bytes=mebibytes << 20 if mebibytes else max(_MATRIX_BYTES, _CACHES * cached),
        read_bytes=read_mebibytes << 20,
        cols=cols,
        rounds=rounds,
        tell=tell,
    )
    shares = {
        f"{speed.weight_format.replace('-', '_')}{'' if speed.numerics == 'fast' else '_exact'}_share": speed.share
        for speed in speeds
    }
    if as_json:
        print_json(shares | facts | {"cache_bytes": cached, "cases": [speed.as_object() for speed in speeds]})
        return
    table = Table("weights", "numerics", "GB/s", "plain read, GB/s", "share")
    for speed in speeds:
        rates = (f"{speed.kernel_rate / 1e9:.1f}", f"{speed.read_rate / 1e9:.1f}", f"{speed.share:.2f}")
        table.add_row(speed.weight_format, speed.numerics, *rates)
    console.print(table)
    say_void(console, facts)


def step(
    geometry: Geometry = "olmoe-1b-7b",
    layers: Layers = None,
    experts_format: Experts = "int4-g64",
    numerics: Numerics = "fast",
    threads: options.Threads = None,
    rounds: Rounds = 7,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of one run.")] = 8,
    read_mebibytes: ReadMebibytes = 1024,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Chrome trace of a token, op by op and fused, for perfetto.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """One decode step with all experts resident: fused, op by op, and the bandwidth that it reaches."""
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.step_speed import measure_step  # noqa: PLC0415

    console, tell = Console(highlight=False), progress_lines()
    config = geometry_named(geometry).cut(layers)
    check_formats(experts_format)
    speed, facts = measure_step(
        config, threads=threads, experts=experts_format, numerics=numerics, rounds=rounds, tokens=tokens,
        read_bytes=read_mebibytes << 20, timeline=timeline, tell=tell,
    )  # fmt: skip
    found = speed.as_object() | facts | {"geometry": geometry, "layers": config["num_hidden_layers"]}
    if as_json:
        print_json(found)
        return
    table = Table("figure", "value")
    table.add_row("tokens/s", f"{found['tokens_per_second']:.1f}")
    table.add_row("weights of a token", format_bytes(found["bytes_per_token"]))
    table.add_row("reached, GB/s", f"{found['bytes_per_second'] / 1e9:.1f}")
    table.add_row("plain read, GB/s", f"{found['read_bytes_per_second'] / 1e9:.1f}")
    table.add_row("share", f"{found['bandwidth_share']:.2f}")
    table.add_row("op by op / fused, time", f"{found['fused_ratio']:.2f}")
    table.add_row("outside native code, us a token", f"{found['python_seconds_per_token'] * 1e6:.0f}")
    console.print(table)
    say_void(console, found)


def costs(
    geometry: Geometry = "olmoe-1b-7b",
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of it.")] = 4,
    contexts: Annotated[
        list[int] | None, typer.Option("--contexts", min=1, help="Tokens of a text; repeat it. Default: 64, 512, 4000.")
    ] = None,
    batches: Annotated[
        list[int] | None, typer.Option("--batches", min=1, help="Texts in a step; repeat it. Default: 1, 4, 16.")
    ] = None,
    experts_format: Experts = "int4-g64",
    numerics: Numerics = "fast",
    threads: options.Threads = None,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of one run.")] = 4,
    read_mebibytes: ReadMebibytes = 1024,
    *,
    as_json: AsJson = False,
) -> None:
    """What a token costs by the length of its text and by how many texts share a step, beside what has to move."""
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.step_costs import measure_costs  # noqa: PLC0415

    console, tell = Console(highlight=False), progress_lines()
    check_formats(experts_format)
    found, facts = measure_costs(
        geometry_named(geometry).cut(layers), threads=threads, experts=experts_format, numerics=numerics,
        contexts=sorted(set(contexts or _CONTEXTS)), batches=sorted(set(batches or _BATCHES)), rounds=rounds,
        steps=steps, read_bytes=read_mebibytes << 20, tell=tell,
    )  # fmt: skip
    facts |= {"geometry": geometry, "layers": layers}
    if as_json:
        print_json(facts | {"cells": [cost.as_object() for cost in found]})
        return
    table = Table("tokens before", "texts", "ms a step", "ms a token", "bytes a step", "limit, ms a step", "share")
    for cell in (cost.as_object() for cost in found):
        step, token, limit = (
            f"{1e3 * cell[name]:.2f}" for name in ("seconds_per_step", "seconds_per_token", "limit_seconds_per_step")
        )
        table.add_row(
            str(cell["context"]), str(cell["batch"]), step, token, format_bytes(int(cell["bytes_per_step"])), limit,
            f"{cell['share_of_limit']:.2f}",
        )  # fmt: skip
    console.print(table)
    say_void(console, facts)


def prefill(
    geometry: Geometry = "olmoe-1b-7b",
    layers: Layers = None,
    experts_format: Experts = "int4-g64",
    numerics: Numerics = "fast",
    threads: options.Threads = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Tokens computed at once.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the prompt.")] = 512,
    rounds: Rounds = 3,
    *,
    as_json: AsJson = False,
) -> None:
    """A prompt with all experts resident."""
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.step_speed import measure_prefill  # noqa: PLC0415

    console, tell = Console(highlight=False), progress_lines()
    config = geometry_named(geometry).cut(layers)
    check_formats(experts_format)
    found = measure_prefill(
        config, threads=threads, experts=experts_format, numerics=numerics, rows=rows, tokens=tokens, rounds=rounds,
        tell=tell,
    ) | {"geometry": geometry, "layers": config["num_hidden_layers"]}  # fmt: skip
    if as_json:
        print_json(found)
        return
    console.print(f"{found['tokens_per_second']:.1f} tokens/s ({tokens} tokens, {rows} at a time)")
    say_void(console, found)


def check_formats(experts_format: str) -> None:
    """Refuses a format of experts that no random store can have."""
    if experts_format not in _EXPERTS:
        raise UsageError(f"--experts-format {experts_format!r} is not known", hint=f"Known: {', '.join(_EXPERTS)}.")
