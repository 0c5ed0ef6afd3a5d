"""`tierd convert SRC DST`: make a store from a published checkpoint."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tierd.checkpoint.config import Config
from tierd.checkpoint.convert import Conversion, ConversionProgress, ConversionReport
from tierd.checkpoint.plan import MADE_DENSE, NATIVE, Planner, plan_conversion
from tierd.checkpoint.registry import known_family, refusal
from tierd.commands.integrations import integration, is_installed
from tierd.commands.progress import ByteProgress
from tierd.errors import UnsupportedModel, UsageError
from tierd.extras import install_hint
from tierd.sizes import format_bytes, format_count, parse_bytes
from tierd.store.formats import MADE_FORMATS

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(convert)


def convert(
    src: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.", show_default=False)],
    dst: Annotated[Path, typer.Argument(help="Where the store will be: a new or empty directory.", show_default=False)],
    *,
    experts: Annotated[
        str, typer.Option(help=f"Format of the experts: {', '.join([NATIVE, *MADE_FORMATS])}.")
    ] = NATIVE,
    dense: Annotated[
        str, typer.Option(help=f"Format of the dense matrices: {', '.join([NATIVE, *MADE_DENSE])}.")
    ] = NATIVE,
    shard_size: Annotated[str, typer.Option(help="Largest shard.")] = "4GiB",
    by: Annotated[
        str,
        typer.Option(
            help="Whose rules say what the tensors mean: mapping (families known here), transformers (any model that "
            "it knows, with the extra `torch`), or auto: the first that can."
        ),
    ] = "auto",
    consume: Annotated[
        bool, typer.Option("--consume", help="Remove source shards as soon as all they hold is stored and verified.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a published checkpoint to a store.

    Safe to stop at any moment: the same command goes on after the last complete shard, and the result is the same
    byte for byte. Everything written is read back and compared.
    """
    began = time.monotonic()
    conversion = Conversion.prepare(
        src,
        dst,
        experts=experts,
        dense=dense,
        consume=consume,
        shard_bytes=parse_bytes(shard_size, option="--shard-size"),
        planner=_planner(src, by),
    )
    if not as_json:
        _say_plan(conversion)
        sys.stdout.flush()
    with ByteProgress("safe to stop; run again to go on") as bar:

        def show(state: ConversionProgress) -> None:
            bar.update(state.done_bytes, state.total_bytes, f"shard {state.shard}/{state.shards}")

        report = conversion.run(show)
    if as_json:
        print(json.dumps(report.to_table(), indent=1))
    else:
        _say_result(report, time.monotonic() - began)


def _planner(source: Path, by: str) -> Planner:
    """Who plans: the mappings for families that have one, else transformers if it is installed."""
    if by not in ("auto", "mapping", "transformers"):
        raise UsageError(f"--by {by!r} is not known", hint="Choose auto, mapping or transformers.")
    if by == "mapping" or not source.is_dir():
        return plan_conversion
    config = Config.read(source)
    if by == "auto" and known_family(config) is not None:
        return plan_conversion
    if by == "auto" and not is_installed():
        unknown = refusal(config.where, config.model_type)
        raise UnsupportedModel(
            unknown.message,
            hint=f"{unknown.hint} With the extra `torch` transformers' rules are taken for others. "
            f"{install_hint('torch')}",
        )
    planner: Planner = integration("conversion").plan_by_transformers
    return planner


def _say_plan(conversion: Conversion) -> None:
    plan = conversion.plan
    geometry = plan.geometry
    counts = sorted({layer.experts for layer in geometry.layers})
    print(
        f"{plan.model.family}: {format_count(len(geometry.layers), 'layer')} with "
        f"{' or '.join(map(str, counts))} experts, "
        f"top-{geometry.top_k}, hidden size {geometry.hidden_size}, expert width {geometry.intermediate_size}"
    )
    dense_bytes = sum(shard.header.file_bytes for shard in plan.dense)
    for number, layout in enumerate(geometry.layouts):
        count = sum(entry.experts for entry in geometry.layers if entry.layout == number)
        print(
            f"experts  {layout.format:<9}{format_bytes(count * layout.record_bytes):>10}  "
            f"{layout.bytes_per_weight:.3f} bytes per weight, records of {format_bytes(layout.record_bytes)}"
        )
    print(f"dense    {plan.dense_format:<9}{format_bytes(dense_bytes):>10}")
    shards = format_count(len(plan.shards), "shard")
    print(f"total    {format_bytes(plan.shard_bytes):>19}  in {shards} at {conversion.target}")
    for remark in [*plan.remarks, *conversion.source.remarks, *_lacking(conversion)]:
        print(f"note: {remark}")
    if conversion.finished:
        print(f"going on: {len(conversion.finished)} of {len(plan.shards)} shards are complete")


def _lacking(conversion: Conversion) -> list[str]:
    if conversion.has_tokenizer:
        return []
    return [f"{conversion.source.folder} has no tokenizer.json: without it the store computes on token numbers only"]


def _say_result(report: ConversionReport, seconds: float) -> None:
    for path in report.freed:
        print(f"freed {path}")
    print(
        f"done in {seconds:.1f} s: {report.path}, {format_bytes(report.total_bytes)}, "
        f"{report.bytes_per_weight:.3f} bytes per weight as planned, read back and verified"
    )
    print(f"fingerprint {report.fingerprint}")
