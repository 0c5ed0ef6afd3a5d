"""What `compute-node check-oracle` does: it compares a model with a reference, and judges what differs."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from compute_node.commands.opening import Opened, open_store
from compute_node.engine.model import Model
from compute_node.engine.near_ties import EQUAL, ERROR, NEAR_TIE, DoubleRun, Verdict, judge, recorded_run
from compute_node.engine.oracle import TOLERANCE, OracleReference, OracleResult, compare, read_reference
from compute_node.settings import NodeSettings
from tierd.checkpoint.convert import convert
from tierd.errors import UsageError
from tierd.extras import install_hint

__all__ = ["compare_folder"]

_PACKAGES = ("torch", "transformers")


def compare_folder(folder: Path, settings: NodeSettings, *, float64: bool | None, as_json: bool) -> None:
    """Compares, prints what was found, and leaves with 1 if it is an error.

    Args:
        folder: with config.json, weights and ref.npz.
        settings: of the node.
        float64: run transformers in float64, too; None: where something differs and it is installed.
        as_json: prints one JSON object instead of text.

    Raises:
        UsageError: no such folder, or a model that has no native program; TierdError of its checkpoint.
    """
    reference = read_reference(folder / "ref.npz")
    with tempfile.TemporaryDirectory(prefix="check-oracle-") as scratch:
        store = Path(scratch) / "store"
        convert(folder, store)
        with open_store(str(store), settings, name="check-oracle") as opened:
            if not isinstance(opened.model, Model):
                raise UsageError(
                    "check-oracle is for native programs, and this model has none",
                    hint=f"Use `tierd integrations transformers --check {shlex.quote(str(folder))}`.",
                )
            result = compare(opened.model, reference)
            content = _describe(opened, opened.model, reference, result)
    double = _double(folder, reference, wanted=float64, passed=result.passed)
    content |= _judged(judge(reference, result, double, recorded_run(folder, reference)))
    if as_json:
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        _show(content)
    if content["verdict"] == ERROR:
        raise typer.Exit(1)


def _double(folder: Path, reference: OracleReference, *, wanted: bool | None, passed: bool) -> DoubleRun | None:
    """A float64 run of transformers, where it is wanted and can be had."""
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if wanted and missing:
        raise UsageError(
            f"--float64 needs {missing[0]}, which is not installed",
            hint=install_hint("torch"),
        )
    if wanted is False or missing or (passed and not wanted):
        return None
    try:
        run: DoubleRun = import_module("compute_node.engine.double_run").double_run(folder, reference)
    except Exception as error:  # whatever transformers says to a checkpoint that it cannot load
        if wanted:
            raise UsageError(f"transformers cannot run {folder} in float64: {error}") from error
        return None
    return run


def _judged(verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict.kind,
        "differences": [{"what": each.text, "near_tie": each.near_tie} for each in verdict.differences],
        "judged_by": verdict.by,
        "float64_distance": verdict.model_distance,
        "reference_float64_distance": verdict.reference_distance,
    }


def _describe(opened: Opened, model: Model, reference: OracleReference, result: OracleResult) -> dict[str, Any]:
    stats = opened.source.stats
    return {
        "family": model.model_type,
        "passed": result.passed,
        "max_logit_error": result.max_logit_error,
        "tolerance": TOLERANCE,
        "logit_scale": reference.scale,
        "greedy_match": result.greedy_equal == len(reference.greedy),
        "greedy_equal": f"{result.greedy_equal}/{len(reference.greedy)}",
        "greedy": result.greedy,
        "routes_equal": result.routes_equal,
        "max_route_weight_error": result.max_route_weight_error,
        "unique_experts": opened.model.experts_chosen,
        "hits": stats.outcomes["hit"],
        "misses": stats.outcomes["miss"],
        "joined": stats.outcomes["joined"],
        "kernel_path": opened.kernel_path,
        "threads": opened.model.threads,
    }


def _show(content: dict[str, Any]) -> None:
    console = Console(highlight=False)
    mark = {EQUAL: "✓", NEAR_TIE: "≈", ERROR: "✗"}[content["verdict"]]
    lines = [
        f"{mark} {content['family']}",
        f"  largest logit error   {content['max_logit_error']:.1e} (at most {content['tolerance']:.0e})",
        f"  greedy tokens         {content['greedy_equal']} equal",
        f"  routes                {'all equal' if content['routes_equal'] else 'differ'}",
        f"  experts               {content['unique_experts']:,} asked, {content['misses']:,} read",
    ]
    if content["float64_distance"] is not None:
        lines.append(
            f"  from float64          {content['float64_distance']:.1e}, "
            f"the reference {content['reference_float64_distance']:.1e}"
        )
    lines += [
        f"  {'≈ near-tie' if each['near_tie'] else '✗ differs'}: {each['what']}" for each in content["differences"]
    ]
    if content["differences"]:
        lines.append(f"  judged by {content['judged_by'] or 'shapes'}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
