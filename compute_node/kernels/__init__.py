"""Kernels of the compute node: everything numeric of a step, compiled by numba, with one fixed order of sums.

Importing the package points the compiler's cache at a directory of this version of the code and compiles, or loads,
every kernel. Weights may hold any bits whatever: results may then be worthless, never the process's memory.
"""

from __future__ import annotations

from pathlib import Path

from compute_node.kernels import cache

_CACHE = cache.prepare()  # before anything imports numba

from compute_node.kernels.compiling import tell_once  # noqa: E402 - numba must find its cache directory set

tell_once()  # before anything is compiled

from compute_node.kernels.attention import attention, kv_append  # noqa: E402
from compute_node.kernels.batch import Batch  # noqa: E402
from compute_node.kernels.elementwise import add, clip, combine, gather_rows, silu_mul  # noqa: E402
from compute_node.kernels.embedding import embed  # noqa: E402
from compute_node.kernels.expert_group import Binding, ExpertGroup  # noqa: E402
from compute_node.kernels.expert_records import ExpertShape  # noqa: E402
from compute_node.kernels.experts import ExpertFFN, ExpertLayout  # noqa: E402
from compute_node.kernels.likeliest import likeliest  # noqa: E402
from compute_node.kernels.matmul import NUMERICS, matmul, quantises  # noqa: E402
from compute_node.kernels.matrix import FORMATS, Matrix, bf16_bits, dequantise, from_float32  # noqa: E402
from compute_node.kernels.norm import rms_norm  # noqa: E402
from compute_node.kernels.op import Op  # noqa: E402
from compute_node.kernels.quantised_rows import QuantisedRows, quantise_rows  # noqa: E402
from compute_node.kernels.rope import rope, rope_tables  # noqa: E402
from compute_node.kernels.router import RoutingRule, router  # noqa: E402
from compute_node.kernels.segment import Segment  # noqa: E402

if next(_CACHE.glob("*/draw.*.nbi"), None) is None:
    # A greedy node never loads it, but what has to be compiled is compiled at the first start, not at the first draw.
    import compute_node.kernels.draw  # noqa: F401

__all__ = [
    "FORMATS",
    "NUMERICS",
    "Batch",
    "Binding",
    "ExpertFFN",
    "ExpertGroup",
    "ExpertLayout",
    "ExpertShape",
    "Matrix",
    "Op",
    "QuantisedRows",
    "RoutingRule",
    "Segment",
    "add",
    "attention",
    "bf16_bits",
    "clip",
    "combine",
    "dequantise",
    "embed",
    "from_float32",
    "gather_rows",
    "kv_append",
    "likeliest",
    "matmul",
    "quantise_rows",
    "quantises",
    "rms_norm",
    "rope",
    "rope_tables",
    "router",
    "silu_mul",
    "warm_up",
]


def warm_up() -> Path:
    """Makes sure that every kernel is compiled and kept, and returns the directory that keeps them.

    Importing this package does the work, seconds the first time and a fraction of one later; call this where that
    should be visible in the code, such as in an image's build or before a clock starts.
    """
    return _CACHE
