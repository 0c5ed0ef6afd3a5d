"""Matrix-vector kernels against plain reading: how much of the memory's bandwidth a walk over weights reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.plain_read import plain_read
from compute_node.bench.quiet import Quiet, alternating
from compute_node.engine.executor import Executor
from compute_node.kernels import Batch, Matrix, QuantisedRows, Segment, matmul, quantise_rows, quantises
from compute_node.kernels.matrix import data_dtype, data_shape, scales_dtype, scales_shape
from tierd.store.reading import huge_page_buffer

__all__ = ["CASES", "KernelSpeed", "measure_kernels"]

CASES: Final = (
    ("int4-g64", "fast"), ("int8", "fast"), ("mxfp4", "fast"), ("int4-g32", "fast"), ("bf16", "fast"),
    ("int4-g64", "exact"), ("int8", "exact"), ("fp8-e4m3", "exact"), ("mxfp4", "exact"), ("int4-g32", "exact"),
)  # fmt: skip
"""bf16 and fp8-e4m3 are computed alike by both numerics."""
_SMALL_SCALE: Final = {"mxfp4": 0x78, "int4-g32": 0x3C24}
"""About 0.01, as the bits of formats that numpy does not have."""


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """One kernel: bytes of weights and scales per second beside plain reading, in alternating runs."""

    weight_format: str
    numerics: str
    matrix_bytes: int
    read_bytes: int
    kernel: list[float]
    read: list[float]

    @property
    def kernel_rate(self) -> float:
        """Median bytes per second of the kernel."""
        return self.matrix_bytes / float(np.median(self.kernel))

    @property
    def read_rate(self) -> float:
        """Median bytes per second of plain reading."""
        return self.read_bytes / float(np.median(self.read))

    @property
    def share(self) -> float:
        """Median over pairs of kernel rate / read rate."""
        pairs = zip(self.kernel, self.read, strict=True)
        return float(np.median([(self.matrix_bytes / k) / (self.read_bytes / r) for k, r in pairs]))

    def as_object(self) -> dict[str, Any]:
        """Both raw sides and what follows from them."""
        return {
            "format": self.weight_format,
            "numerics": self.numerics,
            "matrix_bytes": self.matrix_bytes,
            "read_bytes": self.read_bytes,
            "kernel_seconds": self.kernel,
            "read_seconds": self.read,
            "bytes_per_second": self.kernel_rate,
            "read_bytes_per_second": self.read_rate,
            "share": self.share,
        }


def measure_kernels(
    *, threads: int | None, matrix_bytes: int, read_bytes: int, cols: int, rounds: int, tell: Callable[[str], None]
) -> tuple[list[KernelSpeed], dict[str, Any]]:
    """Every case of `CASES` beside plain reading.

    Args:
        threads: native threads; None: all that the process may use.
        matrix_bytes: of the weights; at least 8 times the last-level cache, or the cache is measured.
        read_bytes: read plainly, a multiple of a page.
        cols: inputs of the matrices.
        rounds: pairs of runs.
        tell: takes a line when a case begins.

    Returns:
        The speeds, and what `Quiet` saw.
    """
    source = huge_page_buffer(read_bytes)
    source.view(np.int64)[:] = 1
    read, sums = plain_read(source)
    found = []
    with Executor(threads) as executor:
        executor.run(read)
        assert int(sums.sum()) == read_bytes // 8
        with Quiet() as quiet:
            for weight_format, numerics in CASES:
                tell(f"{weight_format} {numerics}")
                matrix, segment = _product(weight_format, numerics, matrix_bytes, cols)
                kernel, plain = alternating(rounds, lambda s=segment: executor.run(s), lambda: executor.run(read))
                found.append(KernelSpeed(weight_format, numerics, matrix.nbytes, read_bytes, kernel, plain))
        return found, quiet.report() | {"threads": executor.threads}


def _product(weight_format: str, numerics: str, nbytes: int, cols: int) -> tuple[Matrix, Segment]:
    """A matrix of about `nbytes` and the segment that multiplies it with one row."""
    width = data_shape(weight_format, 1, cols)[1] * data_dtype(weight_format).itemsize
    rows = max(16, nbytes // width // 16 * 16)
    generator = np.random.Generator(np.random.Philox(0))
    top = {"bf16": 0x3F, "fp8-e4m3": 0x7F}.get(weight_format, 256)  # neither infinities nor NaN
    block = generator.integers(0, top, 1 << 20, np.uint8)
    data = _filled(data_shape(weight_format, rows, cols), data_dtype(weight_format), block)
    shape, kind = scales_shape(weight_format, rows, cols), scales_dtype(weight_format)
    scales = None
    if shape is not None and kind is not None:
        scales = _filled(shape, kind, np.full(1 << 18, _SMALL_SCALE.get(weight_format, 0.01), kind).view(np.uint8))
    matrix = Matrix(weight_format, rows, cols, data, scales)
    x = generator.standard_normal((1, cols), np.float32)
    y, batch, ops = np.zeros((1, rows), np.float32), Batch(1), []
    batch.set_rows(1)
    quantised = None
    if quantises(numerics, weight_format):
        quantised = QuantisedRows(1, cols)
        ops.append(quantise_rows("x as bytes", x, quantised, batch))
    ops.append(matmul("product", matrix, x, y, batch, numerics=numerics, quantised=quantised))
    return matrix, Segment("product", ops)


def _filled(shape: tuple[int, ...], kind: np.dtype[Any], block: NDArray[np.uint8]) -> NDArray[Any]:
    whole = huge_page_buffer(int(np.prod(shape)) * kind.itemsize)
    for start in range(0, whole.nbytes, block.nbytes):
        part = whole[start : start + block.nbytes]
        part[...] = block[: len(part)]
    return whole.view(kind).reshape(shape)
