"""`tierd inspect STORE`: what a store holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.sizes import format_bytes, format_count
from tierd.store.manifest import Manifest
from tierd.store.store import ExpertStore

__all__ = ["describe_store", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(inspect)


def inspect(
    store: Annotated[Path, typer.Argument(help="Directory of a converted store.", show_default=False)],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show family, geometry, formats, sizes and files of a store; weights are not read."""
    opened = ExpertStore.open(store)
    if as_json:
        print(json.dumps(describe_store(opened), indent=1))
        return
    manifest, geometry = opened.manifest, opened.geometry
    counts = sorted({layer.experts for layer in geometry.layers})
    numbers = [layer.layer for layer in geometry.layers]
    rows = [
        ("store", f"{opened.path}, format {manifest.format_version}"),
        ("family", _family(manifest)),
        (
            "layers",
            (
                f"{len(numbers)} with routed experts, {_range(numbers)}: "
                f"{' or '.join(map(str, counts))} experts each, top-{geometry.top_k}"
            ),
        ),
        ("sizes", f"hidden {geometry.hidden_size}, expert width {geometry.intermediate_size}"),
        (
            "experts",
            (
                f"{manifest.expert_format}, {geometry.experts_total} records, {format_bytes(geometry.expert_bytes)} "
                f"in {format_count(len(manifest.shards), 'shard')}, slot {format_bytes(geometry.slot_bytes)}"
            ),
        ),
        (
            "dense",
            (
                f"{manifest.dense_format}, {len(opened.dense_names())} tensors, {format_bytes(manifest.dense_bytes)} "
                f"in {format_count(len(manifest.dense_shards), 'shard')}"
            ),
        ),
        ("files", ", ".join(opened.text_files) or "none"),
        ("total", format_bytes(manifest.total_bytes)),
        ("fingerprint", opened.fingerprint),
    ]
    for name, value in rows:
        print(f"{name:<12} {value}")


def _family(manifest: Manifest) -> str:
    family = manifest.family or "synthetic"
    return family if not manifest.model_type or manifest.model_type == family else f"{family} ({manifest.model_type})"


def _range(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"number {first}" if first == last else f"{first} to {last}"


def describe_store(store: ExpertStore) -> dict[str, Any]:
    """The manifest and what follows from it, for machines."""
    geometry = store.geometry
    return {
        "path": str(store.path),
        **store.manifest.model_dump(mode="json"),
        "experts_total": geometry.experts_total,
        "expert_bytes": geometry.expert_bytes,
        "slot_bytes": geometry.slot_bytes,
        "bytes_per_weight": [layout.bytes_per_weight for layout in geometry.layouts],
        "dense_bytes": store.manifest.dense_bytes,
        "total_bytes": store.manifest.total_bytes,
    }
