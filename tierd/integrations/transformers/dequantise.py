"""Codes and scales of a store's formats to float32, with torch, on whatever device they lie.

The formats are those of `tierd.store.records.expert_layout`.
"""

from __future__ import annotations

import torch

from tierd.errors import UnsupportedModel
from tierd.store.formats import ExpertFormat
from tierd.store.number_formats import E2M1
from tierd.store.records import FP8_BLOCK, INT4_GROUP, MICRO_GROUP

__all__ = ["dequantise", "fp8_values"]


def dequantise(expert_format: str, codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """float32 [rows, columns].

    Args:
        expert_format: one of `ExpertFormat` that has scales.
        codes: int8 or uint8 [rows, …].
        scales: as the record has them.
        columns: of the matrix.

    Raises:
        UnsupportedModel: a format that is not known here.
    """
    match expert_format:
        case ExpertFormat.INT8:
            return codes.float() * scales[:, None]
        case ExpertFormat.INT4_G64:
            values = _nibbles(codes, INT4_GROUP).float() - 8
            return _scaled(values, scales.float(), INT4_GROUP)[:, :columns]
        case ExpertFormat.INT4_G32:
            values = _nibbles(codes, MICRO_GROUP).float() - 8
            return _scaled(values, scales.float(), MICRO_GROUP)[:, :columns]
        case ExpertFormat.MXFP4:
            table = torch.from_numpy(E2M1).to(codes.device)
            values = table[_nibbles(codes, MICRO_GROUP).int()]
            return _scaled(values, _powers(scales), MICRO_GROUP)[:, :columns]
        case ExpertFormat.FP8:
            return fp8_values(codes, scales)
        case _:
            raise UnsupportedModel(f"experts of format {expert_format} are not read by torch here")


def fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns] of e4m3 codes, uint8 [rows, columns], and scales of 128 x 128 blocks."""
    rows, columns = codes.shape
    spread = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return codes.view(torch.float8_e4m3fn).float() * spread


def _nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 [rows, columns]: in each run of `group` bytes low nibbles hold one group, high ones the next."""
    rows = packed.shape[0]
    blocks = packed.view(rows, -1, 1, group)
    return torch.cat([blocks & 15, blocks >> 4], dim=2).view(rows, -1)


def _scaled(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """Values [rows, columns], each group times its scale; scales beyond the columns belong to nothing."""
    rows, columns = values.shape
    groups = values.view(rows, columns // group, group)
    return (groups * scales[:, : columns // group, None]).view(rows, columns)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """float32 2^(b - 127) of each byte, exactly; 255 is NaN."""
    wide = exponents.int()
    bits = torch.where(wide == 0, 1 << 22, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).int().view(torch.float32)
