"""`compute-node bench`: measurements of this machine. Each has a file of its own and a `--json`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Final

import typer

from compute_node.kernel_choice import VARIABLE, force_kernels
from tierd.outline import add_outline

__all__ = ["MEASUREMENTS", "register"]

MEASUREMENTS: Final = {
    "arena": (
        "arena",
        "Compare a model whose experts lie in a daemon's arena with the same one in the node's own memory.",
    ),
    "decode": (
        "decode",
        "Decode with experts on the drive. The store (10 GB by default) is made once, in the user's cache.",
    ),
    "far": ("far", "Decode over a slow link between two network namespaces; needs root, `ip` and `tc`."),
    "llama-cpp": (
        "llama_cpp",
        "Decode and prefill beside llama.cpp; needs the packages xllamacpp and gguf, and 4 GB of temporary space.",
    ),
    "near": (
        "near",
        "Decode on two nodes that share one daemon and all cores, then kill one in the middle of its work.",
    ),
    "prefetch": (
        "prefetch",
        (
            "Compare predictors on the embedded model's routing, then time prefetch on a real geometry with random "
            "weights."
        ),
    ),
    "serve": (
        "serve",
        "Serve 1, 4, 16 and 64 clients at once, all experts in RAM; some of them leave in the middle of an answer.",
    ),
    "kernels": ("speed", "Matrix-vector products beside plain reading of memory."),
    "step": (
        "speed",
        "One decode step with all experts resident: fused, op by op, and the bandwidth that it reaches.",
    ),
    "costs": (
        "speed",
        "What a token costs by the length of its text and by how many texts share a step, beside what has to move.",
    ),
    "prefill": ("speed", "A prompt with all experts resident."),
    "trace": (
        "trace",
        "Decode the tokens of a recorded run again: the same work for every setting, whatever it would have generated.",
    ),
}
"""In the order of the help: `bench_…` modules with a function `register`, and the first paragraph of each help."""


def register(app: typer.Typer, wanted: str | None = None) -> None:
    """Adds the group.

    Args:
        app: that gets it.
        wanted: a measurement, whose module alone is imported; what is none: all are listed, and none is there; None:
            all are there.
    """
    group = typer.Typer(name="bench", no_args_is_help=True, help="Measure this machine.")
    if wanted is not None and wanted not in MEASUREMENTS:
        add_outline(group, {name: summary for name, (_, summary) in MEASUREMENTS.items()})
    else:
        if wanted is not None:  # else for documentation
            force_kernels(os.environ.get(VARIABLE, "auto"))  # measurements import the kernels
        found = MEASUREMENTS.values() if wanted is None else [MEASUREMENTS[wanted]]
        for module in dict.fromkeys(module for module, _ in found):
            import_module(f"compute_node.commands.bench_{module}").register(group)
    group.callback()(_group)
    app.add_typer(group)


def _group() -> None:
    """Measure this machine; figures of a busy machine are void, and say so."""
