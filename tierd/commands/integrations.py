"""`tierd integrations transformers`: what a checkpoint of any architecture needs to run on tierd's experts."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.errors import UsageError
from tierd.extras import install_hint

__all__ = ["integration", "is_installed", "register"]

_PACKAGES = ("torch", "transformers")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    group = typer.Typer(no_args_is_help=True, help="Experts for other people's model code.")
    group.callback()(_group)
    group.command()(transformers)
    app.add_typer(group, name="integrations")


def _group() -> None:
    """Experts for other people's model code."""


def is_installed() -> bool:
    """Whether the extra `torch` is there."""
    return all(find_spec(package) is not None for package in _PACKAGES)


def integration(module: str) -> Any:
    """A module of `tierd.integrations.transformers`; UsageError if torch or transformers is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise UsageError(f"{package} is not installed", hint=install_hint("torch"))
    return import_module(f"tierd.integrations.transformers.{module}")


def transformers(
    *,
    check: Annotated[
        Path, typer.Option("--check", help="Folder of a tiny checkpoint: config.json and safetensors files.")
    ],
    arena: Annotated[str, typer.Option(help="RAM for experts: an amount, or a share of all.")] = "25%",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Convert a tiny checkpoint, serve it with few experts in RAM, and compare with the unmodified model.

    Both run in float32. Exit code 0 if the greedy tokens are the same, else 1.
    """
    result = integration("check").check(check, arena=arena)
    if as_json:
        print(json.dumps(result.as_object()))
    elif not result.supported:
        print(f"✗ {result.architecture}: {result.reason}")
    else:
        print(f"{'✓' if result.passed else '✗'} {result.architecture}")
        print(f"  greedy tokens        {result.greedy_equal} equal")
        print(f"  largest logit error  {result.max_logit_error:.1e}, where logits vary by {result.logit_scale:.1e}")
        print(f"  experts              {result.unique_experts:,} chosen, {result.misses:,} read")
    if not result.passed:
        raise typer.Exit(1)
