"""The dense tensors of a store as a state dict that is read tensor by tensor, when transformers asks for each."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from tierd.client.source import StoreView
from tierd.errors import UnsupportedModel
from tierd.integrations.transformers.dequantise import fp8_values
from tierd.store.manifest import DenseTensorInfo

__all__ = ["LazyTensor", "lazy_state"]

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i8": torch.float32,
    "fp8": torch.float32,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
_SAFETENSORS = {"f32": "F32", "bf16": "BF16", "i8": "F32", "fp8": "F32", "i64": "I64", "i32": "I32", "u8": "U8"}


class LazyTensor:
    """One dense tensor; `tensor[...]` reads it. What transformers takes in place of a slice of a safetensors file."""

    def __init__(self, store: StoreView, info: DenseTensorInfo, lock: threading.Lock) -> None:
        if info.dtype not in _DTYPES:
            raise UnsupportedModel(f"dense tensor {info.name} is stored as {info.dtype}: torch does not read it here")
        self._store = store
        self._info = info
        self._lock = lock

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read."""
        return _DTYPES[self._info.dtype]

    @property
    def shape(self) -> torch.Size:
        """Of what is read."""
        return torch.Size(self._info.shape)

    def is_floating_point(self) -> bool:
        """Whether these are weights."""
        return bool(self.dtype.is_floating_point)

    def get_dtype(self) -> str:
        """Name of the type in a safetensors file."""
        return _SAFETENSORS[self._info.dtype]

    def get_shape(self) -> list[int]:
        """The shape as a list."""
        return list(self._info.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        with self._lock:
            tensor = self._store.read_dense(self._info.name)
        data = tensor.data
        if tensor.dtype == "bf16":
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)[place]
        if tensor.scales is not None:
            scales = torch.from_numpy(np.ascontiguousarray(tensor.scales))
            if tensor.dtype == "fp8":
                return fp8_values(torch.from_numpy(data), scales)[place]
            return (torch.from_numpy(data).float() * scales[:, None])[place]
        return torch.from_numpy(data)[place]


def lazy_state(store: StoreView) -> dict[str, LazyTensor]:
    """All dense tensors of a store under their own names; scales are part of their matrices."""
    lock = threading.Lock()
    infos = store.manifest.dense
    scales = {info.scales for info in infos if info.scales is not None}
    return {info.name: LazyTensor(store, info, lock) for info in infos if info.name not in scales}
