"""An op: one compiled kernel with its arguments, ready to be run over any slice of its output units.

A kernel is a C function `void(int64 args, int64 lo, int64 hi)`. `args` is the address of a record of int64 (addresses
and sizes); `lo..hi` is the slice of output units (columns, rows, heads of rows) to compute. Slices are independent,
so any split over threads gives the same bits. The number of live rows is read through a pointer when the op runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["KERNEL", "Op", "address_of", "check_buffer", "record"]

KERNEL: Final = "void(int64, int64, int64)"
"""Signature of every kernel: address of the record, first unit, end unit."""

_FUNCTION: Final = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@dataclass(slots=True)
class Op:
    """One kernel bound to its buffers.

    Attributes:
        name: for people, such as "layer 3 q_proj".
        kernel: which kernel it is, such as "matmul bf16".
        address: of the compiled function.
        args: int64 record that the function reads.
        rows: int64 array whose first element is the number of live rows when the op runs.
        units: output units that may be split over threads; of one row if `per_row`, else of the op.
        per_row: units are counted for each live row.
        grain: slices begin at multiples of this many units.
        work: multiply-adds (or as much time) of one unit for one row; only sizes the split, never the result.
        keep: objects whose memory the record points into.
        weights: address of the weights of unit 0, whose first lines are asked for while the op before still computes;
            0 where there are none or they are not known in advance.
        unit_bytes: distance of the weights of two units.
        halt: int64 array whose first element the op sets; anything but 0 ends the run behind this op. Such an op is
            never split.
    """

    name: str
    kernel: str
    address: int
    args: NDArray[np.int64]
    rows: NDArray[np.int64]
    units: int
    per_row: bool
    grain: int
    work: int
    keep: tuple[object, ...]
    weights: int = 0
    unit_bytes: int = 0
    halt: NDArray[np.int64] | None = None

    def __call__(self, lo: int = 0, hi: int | None = None) -> None:
        """Computes units lo..hi, all of them by default, on the calling thread."""
        end = self.live_units()
        if not 0 <= lo <= end or (hi is not None and not lo <= hi <= end):
            raise UsageError(f"{self.name}: no units {lo}..{hi} of {end}")
        _FUNCTION(self.address)(address_of(self.args), lo, end if hi is None else hi)

    def live_units(self) -> int:
        """Output units for the rows that are live now."""
        return self.units * int(self.rows[0]) if self.per_row else self.units

    def live_work(self) -> int:
        """Multiply-adds of one run with the rows that are live now."""
        return self.units * int(self.rows[0]) * self.work


def record(values: Sequence[int]) -> NDArray[np.int64]:
    """The int64 record of an op's arguments."""
    return np.array(values, np.int64)


def address_of(array: NDArray[Any] | None) -> int:
    """Address of an array's first element; 0 for None."""
    return 0 if array is None else int(array.ctypes.data)


def check_buffer(
    op: str,
    what: str,
    array: NDArray[Any],
    shape: Sequence[int | None],
    dtype: type[np.generic] = np.float32,
    *,
    writable: bool = False,
) -> None:
    """Refuses an array that a kernel could not use.

    Args:
        op: name of the op, for the message.
        what: name of the argument, for the message.
        array: to be checked; all axes but the first contiguous.
        shape: wanted lengths; None for any length. The first axis may be longer than asked.
        dtype: wanted element type.
        writable: the kernel writes to it.

    Raises:
        UsageError: it has another shape, type or layout.
    """
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    if array.dtype != np.dtype(dtype) or array.ndim != len(shape):
        raise UsageError(f"{op}: {what} must be {np.dtype(dtype)} {wanted}, not {array.dtype} {list(array.shape)}")
    for axis, (have, want) in enumerate(zip(array.shape, shape, strict=True)):
        if want is not None and (have < want if axis == 0 else have != want):
            raise UsageError(f"{op}: {what} must have shape {wanted}, not {list(array.shape)}")
    inner = array.itemsize
    for length, stride in zip(reversed(array.shape[1:]), reversed(array.strides[1:]), strict=True):
        if stride != inner and length > 1:
            raise UsageError(f"{op}: the rows of {what} must be contiguous")
        inner *= length
    if array.strides[0] < inner and array.shape[0] > 1:
        raise UsageError(f"{op}: the rows of {what} overlap")
    if array.ctypes.data % array.itemsize:
        raise UsageError(f"{op}: {what} is not aligned to its elements")
    if writable and not array.flags.writeable:
        raise UsageError(f"{op}: {what} is read-only and would be written")
