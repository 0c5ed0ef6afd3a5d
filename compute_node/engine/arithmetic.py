"""Which arithmetic the kernels have, as a name that peers can compare: another order of sums has another one."""

from __future__ import annotations

from typing import Final

__all__ = ["ARITHMETIC", "named_numerics"]

ARITHMETIC: Final = "a2323aea"
"""Of the kernels' bits, which `tests/unit/test_kernel_targets.py` pins and this is computed from."""


def named_numerics(numerics: str) -> str:
    """Numerics with the version of the kernels' arithmetic: who has the same name computes the same bits."""
    return f"{numerics} {ARITHMETIC}"
