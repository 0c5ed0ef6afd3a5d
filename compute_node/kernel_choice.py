"""Which machine code the kernels become: what this processor does best, or what an option says.

The compiler reads its target from the environment when it is first imported, so a choice is made before that. It
holds for processes that this one begins, too.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Final, Literal

from tierd.errors import UsageError

__all__ = ["VARIABLE", "KernelChoice", "force_kernels", "path_of"]

KernelChoice = Literal["auto", "avx512", "avx2", "portable"]

VARIABLE: Final = "TIERD_NODE_KERNELS"
"""Where the choice is in the environment."""

_PATHS: Final = ("portable", "avx2", "avx512")
_NAME, _FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


def path_of(features: str) -> str:
    """`avx512`, `avx2` or `portable`, by processor features such as `+avx2,+fma,-avx512f`."""
    present = {item[1:] for item in features.split(",") if item.startswith("+")}
    if "avx512f" in present:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= present else "portable"


def force_kernels(path: str) -> None:
    """Has kernels compiled for `path`; `auto` leaves it as the compiler finds it, its own variables included.

    Args:
        path: one of `KernelChoice`.

    Raises:
        UsageError: no such path, or this processor has not the instructions of it, or kernels of another one are
            loaded.
    """
    if path == "auto":
        return
    if path not in _PATHS:
        raise UsageError(f"--kernels {path} is unknown", hint=f"Known: auto, {', '.join(reversed(_PATHS))}.")
    import llvmlite.binding as llvm  # noqa: PLC0415 - most commands need it a moment later only, or not at all

    features = llvm.get_host_cpu_features().flatten()
    best = path_of(features)
    if _PATHS.index(path) > _PATHS.index(best):
        raise UsageError(
            f"--kernels {path}: this processor has not its instructions",
            hint=f"The best for it is {best}, which `auto` takes.",
        )
    _check_loaded(path)
    for variable in (_NAME, _FEATURES):
        os.environ.pop(variable, None)
    if path == "portable":
        os.environ |= {_NAME: "generic", _FEATURES: ""}
    elif path != best:
        wide = re.compile(r"\+(?=.*avx(512|10))")
        kept = (wide.sub("-", item) for item in features.split(","))
        os.environ |= {_NAME: llvm.get_host_cpu_name(), _FEATURES: ",".join(kept)}


def _check_loaded(path: str) -> None:
    if "compute_node.kernels" not in sys.modules:
        return
    from compute_node.engine.kernel_path import kernel_path  # noqa: PLC0415 - it imports the kernels

    if kernel_path() != path:
        raise UsageError(f"--kernels {path}: kernels for {kernel_path()} are loaded in this process already")
