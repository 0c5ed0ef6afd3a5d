"""Which machine code the kernels become on this processor, as a name that node and worker can compare."""

from __future__ import annotations

from compute_node.kernel_choice import path_of
from compute_node.kernels.cache import processor

__all__ = ["kernel_path"]


def kernel_path() -> str:
    """`avx512`, `avx2` or `portable`, by what kernels are compiled for; all three compute the same bits."""
    return path_of(processor()[1])
