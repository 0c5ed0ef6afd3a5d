"""Dense tensors of a store as the kernels want them: matrices in their stored format, vectors in float32."""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels import Matrix
from compute_node.kernels.matrix_rows import take_rows
from tierd.client.source import StoreView
from tierd.errors import StoreDamaged, UnsupportedModel

__all__ = ["Weights"]

_FORMATS = {"f32": "f32", "bf16": "bf16", "i8": "int8", "fp8": "fp8-e4m3"}


class Weights:
    """Reads each tensor once, checks its shape, and knows which ones nobody asked for.

    Args:
        store: verified source of dense tensors.
    """

    def __init__(self, store: StoreView) -> None:
        self._store = store
        dense = store.manifest.dense
        self._names = {info.name for info in dense} - {info.scales for info in dense}
        self._used: set[str] = set()
        self.nbytes = 0

    def matrix(self, name: str, rows: int, cols: int) -> Matrix:
        """A weight matrix [rows, cols], rows are outputs; StoreDamaged if it is missing or has another shape."""
        data, dtype, scales = self._read(name, (rows, cols))
        return Matrix(_FORMATS[dtype], rows, cols, data, scales)

    def parts(self, name: str, rows: int, cols: int, orders: Listing[NDArray[np.int64]]) -> tuple[Matrix, ...]:
        """A weight matrix [rows, cols] taken apart: for each of `orders` a matrix of these rows, in that order."""
        whole = self.matrix(name, rows, cols)
        return tuple(take_rows(whole, order) for order in orders)

    def vector(self, name: str, length: int) -> NDArray[np.float32]:
        """A norm's weight or a bias, widened to float32 [length]; StoreDamaged if missing or of another shape."""
        return self.array(name, (length,))

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A tensor that is no matrix, widened to float32; StoreDamaged if it is missing or has another shape."""
        data, dtype, _ = self._read(name, shape)
        if dtype == "f32":
            return np.ascontiguousarray(data, np.float32)
        if dtype == "bf16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        kind = "a vector" if len(shape) == 1 else "no matrix and"
        raise StoreDamaged(f"dense tensor {name} is {kind} stored as {dtype}; f32 or bf16 is expected")

    def finish(self, *, unused_allowed: set[str], kept: tuple[str, ...] = ()) -> None:
        """UnsupportedModel if the store has dense tensors that no op reads: the model would not be the one meant.

        Args:
            unused_allowed: names that need not be read.
            kept: beginnings of such names.
        """
        left = sorted(name for name in self._names - self._used - unused_allowed if not name.startswith(kept))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise UnsupportedModel(
                f"the store has dense tensors that this family does not use: {', '.join(left[:3])}{more}",
                hint="The checkpoint is of another variant of the family; it is not guessed what they mean.",
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> tuple[NDArray[np.generic], str, NDArray[np.float32] | None]:
        if name not in self._names:
            raise StoreDamaged(
                f"the store has no dense tensor {name}", hint="Its config.json and its weights do not match."
            )
        tensor = self._store.read_dense(name)
        self._used.add(name)
        if tuple(tensor.data.shape) != shape:
            raise StoreDamaged(
                f"dense tensor {name} has the shape {list(tensor.data.shape)}, config.json wants {list(shape)}"
            )
        if tensor.dtype not in _FORMATS:
            raise StoreDamaged(f"dense tensor {name} has the unknown dtype {tensor.dtype}")
        self.nbytes += tensor.data.nbytes
        return tensor.data, tensor.dtype, tensor.scales
