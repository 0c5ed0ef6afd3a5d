"""Which machine code the kernels become on this processor, as a name that node and worker can compare."""

from __future__ import annotations

from compute_node.kernels.cache import processor

__all__ = ["kernel_path"]


def kernel_path() -> str:
    """`avx512`, `avx2` or `portable`, by what kernels are compiled for; all three compute the same bits."""
    present = {item[1:] for item in processor()[1].split(",") if item.startswith("+")}
    if "avx512f" in present:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= present else "portable"
