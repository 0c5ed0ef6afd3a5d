"""Token embeddings: a row of the table for each token id, widened to float32."""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import F32, I8, I16, I32, f32_at, i64_at
from compute_node.kernels.matrix import FORMATS, Matrix
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["embed"]

F32_FORMAT: Final = FORMATS.index("f32")
BF16_FORMAT: Final = FORMATS.index("bf16")


def _element(builder: ir.IRBuilder, address: Any, index: Any, kind: Any) -> Any:
    return builder.load(builder.gep(builder.inttoptr(address, kind.as_pointer()), [index]))


@intrinsic
def _bf16_value(_typing: Any, address: Any, index: Any) -> Any:
    """Element `index` of bf16 values at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        bits = builder.zext(_element(builder, a[0], a[1], I16), I32)
        return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def _int8_value(_typing: Any, address: Any, index: Any) -> Any:
    """Element `index` of int8 values at an address, as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        return builder.sitofp(_element(builder, a[0], a[1], I8), F32)

    return types.float32(types.int64, types.int64), generate


@cfunc(KERNEL, cache=True, error_model="numpy")
def _embed_kernel(args: int, lo: int, hi: int) -> None:
    """Record: token ids, table, table row bytes, table rows, format, scales, y, y stride, width."""
    m = i64_at(args)
    width = m[8]
    for row in range(lo, hi):
        token = i64_at(m[0])[row]
        y = f32_at(m[6] + row * m[7])
        source = m[1] + token * m[2]
        if token < 0 or token >= m[3]:
            for j in range(width):
                y[j] = np.float32(np.nan)
        elif m[4] == F32_FORMAT:
            values = f32_at(source)
            for j in range(width):
                y[j] = values[j]
        elif m[4] == BF16_FORMAT:
            for j in range(width):
                y[j] = _bf16_value(source, j)
        else:
            scale = f32_at(m[5])[token]
            for j in range(width):
                y[j] = _int8_value(source, j) * scale


def embed(name: str, table: Matrix, y: NDArray[np.float32], batch: Batch) -> Op:
    """`y[r] = table[batch.token_ids[r]]` for the live rows.

    Args:
        name: of the op.
        table: `f32`, `bf16` or `int8`, [vocabulary, width].
        y: float32 [max_rows, width]; the row of an id outside the table becomes NaN.
        batch: the live rows and their token ids.
    """
    if table.format not in {"f32", "bf16", "int8"}:
        raise UsageError(f"{name}: an embedding table cannot be {table.format}", hint="keep it as bf16 or int8")
    check_buffer(name, "y", y, (batch.max_rows, table.cols), writable=True)
    data = table.data
    args = record([
        address_of(batch.token_ids), address_of(data), data.shape[1] * data.itemsize, table.rows,
        FORMATS.index(table.format), address_of(table.scales), address_of(y), y.strides[0], table.cols,
    ])  # fmt: skip
    return Op(
        name, f"embed {table.format}", _embed_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=table.cols, keep=(table, y, batch),
    )  # fmt: skip
