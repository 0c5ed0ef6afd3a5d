"""The table of families that `compute-node families` shows, from what the oracle tests measure.

python tests/oracles/families.py    # measures all folders and writes compute_node/models/families.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import OracleResult, compare, read_reference
from compute_node.models.registry import family_of
from tierd.checkpoint.config import text_settings
from tierd.checkpoint.convert import convert
from tierd.checkpoint.registry import FAMILIES
from tierd.client.in_process import InProcess
from tierd.store.store import ExpertStore

FOLDER = Path(__file__).parent
FOLDERS = sorted(path.parent.name for path in FOLDER.glob("*/ref.npz"))
TABLE = FOLDER.parents[1] / "compute_node" / "models" / "families.json"


CODERS = ("f32", "bf16", "int8", "int4-g64")
"""Formats that `tierd convert` makes of any family's plain weights; others are taken over as they were published."""


@dataclass(frozen=True)
class Measured:
    """What a folder gave, and the format in which its experts were stored."""

    result: OracleResult
    stored: str


def measure(name: str, scratch: Path) -> Measured:
    """Runs one folder, experts as published, in chunks of seven tokens with three experts in RAM."""
    convert(FOLDER / name, scratch / "store", experts="native", dense="native")
    store = ExpertStore.open(scratch / "store")
    source = InProcess(store, budget=3 * store.geometry.slot_bytes)
    with Model(source, ModelOptions(threads=1, rows=7)) as model:
        result = compare(model, read_reference(FOLDER / name / "ref.npz"))
    assert source.stats.outcomes["miss"] > 0
    return Measured(result, store.manifest.expert_format)


def table(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """One row per family, over all of its folders; the largest error with two digits, since it is a bound."""
    rows: dict[str, dict[str, Any]] = {}
    for folder, found in measured.items():
        result = found.result
        config = json.loads((FOLDER / folder / "config.json").read_text())
        family, sizes = family_of(config)
        names = next(mapping.model_types for mapping in FAMILIES if family.model_type in mapping.model_types)
        row = rows.setdefault(
            sizes.family,
            {
                "name": sizes.family,
                "model_types": [],
                "formats": list(CODERS),
                "oracle": f"transformers {config['transformers_version']}, {config['architectures'][0]}",
                "max_logit_error": 0.0,
                "greedy_match": True,
            },
        )
        own = {config["model_type"], text_settings(config)["model_type"]}
        composites = {name for name in names if family.model_type == "kimi_k2" and name.startswith("kimi")}
        row["model_types"] = sorted({*row["model_types"], *own, *composites})
        if found.stored not in row["formats"]:
            row["formats"].append(found.stored)
        row["max_logit_error"] = max(row["max_logit_error"], float(f"{result.max_logit_error:.1e}"))
        row["greedy_match"] = row["greedy_match"] and result.greedy_equal == len(result.greedy)
    return [rows[name] for name in sorted(rows)]


def main() -> None:
    """Measures every folder and writes the table."""
    measured = {}
    for name in FOLDERS:
        with tempfile.TemporaryDirectory() as scratch:
            measured[name] = measure(name, Path(scratch))
        result = measured[name].result
        sys.stdout.write(f"{name}: {result.max_logit_error:.1e}, {result.greedy_equal} of 16\n")
    TABLE.write_text(json.dumps(table(measured), indent=2) + "\n")


if __name__ == "__main__":
    main()
