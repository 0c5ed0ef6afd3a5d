"""Which machine code the kernels become on this processor, as a name that node and worker can compare."""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding

__all__ = ["kernel_path"]


def kernel_path() -> str:
    """`avx512`, `avx2` or `portable`, by the features that numba compiles for; all three compute the same bits."""
    chosen = os.environ.get("NUMBA_CPU_FEATURES")
    if chosen is None:
        features: dict[str, Any] = dict(llvmlite.binding.get_host_cpu_features())
        present = {name for name, available in features.items() if available}
    else:
        present = {item[1:] for item in chosen.split(",") if item.startswith("+")}
    if "avx512f" in present:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= present else "portable"
