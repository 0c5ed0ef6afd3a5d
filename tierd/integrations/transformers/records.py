"""From the bytes of a record to torch tensors: views where the record has the model's own type, else dequantised.

Nothing is copied where the store's format is the model's type and the model computes on the CPU: the tensors then lie
on the arena's own pages. They are valid only as long as the source says; see `tierd.client.source.Use`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tierd.errors import UnsupportedModel
from tierd.integrations.transformers.dequantise import dequantise
from tierd.store.records import RecordLayout

__all__ = ["ExpertWeights", "RecordReader"]

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i8": torch.int8,
    "u8": torch.uint8,
}
_FLOATS = ("f32", "bf16", "f16")
_MOST_VIEWS = 1 << 15
"""Addresses whose views are kept: making views costs as much as a small matrix product."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert, ready for the model's type and device; rows of matrices are outputs.

    Attributes:
        up: [2I, H] with the gate's rows first, or [I, H] where there is no gate.
        down: [H, I].
        up_bias: [2I] or [I]; None where there is none.
        down_bias: [H]; None where there is none.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in (self.up, self.down, self.up_bias, self.down_bias) if each is not None)


class RecordReader:
    """Reads records of one layout.

    Args:
        layout: of the records.
        dtype: in which the model computes.

    Raises:
        UnsupportedModel: a part of the layout has a meaning that is not known here.
    """

    def __init__(self, layout: RecordLayout, dtype: torch.dtype) -> None:
        self.layout = layout
        self._dtype = dtype
        self._parts = {part.name: part for part in layout.parts}
        self._gate = "gate" in self._parts
        self._views: dict[int, ExpertWeights] = {}
        known = {"gate", "up", "down"}
        for name in self._parts:
            matrix, _, rest = name.partition(".")
            if matrix not in known or rest not in ("", "scales", "bias"):
                raise UnsupportedModel(f"record part {name!r} of format {layout.format} is not read by torch here")
        gate = self._parts.get("gate")
        up = self._parts["up"]
        # Gate and up lie behind each other: one matrix product serves both.
        self._joined = (
            gate is not None
            and f"{up.name}.scales" not in self._parts
            and up.offset == gate.offset + gate.nbytes
            and up.dtype == gate.dtype
        )

    @property
    def in_place(self) -> bool:
        """Whether `weights` gives views of the record itself, without a copy of the large matrices."""
        up = self._parts["up"]
        plain = up.dtype in _FLOATS and _DTYPES[up.dtype] == self._dtype
        return plain and (self._joined or not self._gate)

    def weights_at(self, address: int) -> ExpertWeights:
        """The weights of the record at an address: views of it where they can be, and then valid as long as it is."""
        if not self.in_place:
            return self.weights(self.at(address))
        found = self._views.get(address)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[address] = self.weights(self.at(address))
        return found

    def at(self, address: int) -> torch.Tensor:
        """The record at an address, as uint8 [record_bytes]; no copy. Nobody may write to it."""
        memory = (ctypes.c_ubyte * self.layout.record_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def weights(self, record: torch.Tensor) -> ExpertWeights:
        """The weights in a record, uint8 [record_bytes] on any device; they are on the same device."""
        up = self._up(record)
        biases = [self._bias(record, name) for name in ("gate", "up", "down")]
        up_bias = biases[1]
        if self._gate and biases[0] is not None and biases[1] is not None:
            up_bias = torch.cat([biases[0], biases[1]])
        return ExpertWeights(up, self._matrix(record, "down"), up_bias, biases[2])

    def _up(self, record: torch.Tensor) -> torch.Tensor:
        if not self._gate:
            return self._matrix(record, "up")
        if self._joined:
            gate, up = self._parts["gate"], self._parts["up"]
            both = record[gate.offset : up.offset + up.nbytes].view(_DTYPES[gate.dtype])
            return both.view(gate.shape[0] + up.shape[0], -1).to(self._dtype)
        return torch.cat([self._matrix(record, "gate"), self._matrix(record, "up")])

    def _view(self, record: torch.Tensor, name: str) -> torch.Tensor:
        part = self._parts[name]
        return record[part.offset : part.offset + part.nbytes].view(_DTYPES[part.dtype]).view(part.shape)

    def _bias(self, record: torch.Tensor, name: str) -> torch.Tensor | None:
        return self._view(record, f"{name}.bias").to(self._dtype) if f"{name}.bias" in self._parts else None

    def _matrix(self, record: torch.Tensor, name: str) -> torch.Tensor:
        codes = self._view(record, name)
        if f"{name}.scales" not in self._parts:
            return codes.to(self._dtype)
        hidden, width = self.layout.sizes
        columns = width if name == "down" else hidden
        scales = self._view(record, f"{name}.scales")
        return dequantise(self.layout.format, codes, scales, columns).to(self._dtype)
