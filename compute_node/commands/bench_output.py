"""What all measurements of `compute-node bench` say alike: how far they are, their JSON, and that one was disturbed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from tierd.sizes import format_share

__all__ = ["print_json", "progress_lines", "say_void"]


def progress_lines() -> Callable[[str], None]:
    """What tells a waiting person at a terminal what is going on."""
    notes = Console(stderr=True, highlight=False)

    def tell(line: str) -> None:
        if notes.is_terminal:
            notes.print(f"  {line} ...", style="dim", markup=False)

    return tell


def print_json(found: dict[str, Any]) -> None:
    """One line on standard output."""
    sys.stdout.write(json.dumps(found) + "\n")


def say_void(console: Console, facts: dict[str, Any]) -> None:
    """Says so if others took too much of the cores; `facts` has what `Quiet.report` has."""
    if facts["void"]:
        share = format_share(facts["foreign_cpu_share"])
        console.print(f"Void: other processes took {share} of the cores. Repeat it on a quiet machine.")
