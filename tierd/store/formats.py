"""Names of the number formats in which a store keeps weights, and of what an expert does between its matrices."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["MADE_FORMATS", "Activation", "DenseFormat", "ExpertFormat"]


class ExpertFormat(StrEnum):
    """Format of the routed experts of a store."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    """int8 codes with one float32 scale per output row."""
    INT4_G64 = "int4-g64"
    """4-bit codes with one float16 scale per 64 columns of a row."""
    FP8 = "fp8-e4m3"
    """8-bit floats with one float32 scale per 128 x 128 weights; as published, never made here."""
    MXFP4 = "mxfp4"
    """4-bit floats with a power of two as scale per 32 columns of a row; as published, never made here."""
    INT4_G32 = "int4-g32"
    """4-bit codes with one bfloat16 scale per 32 columns of a row; as published, never made here."""


MADE_FORMATS: Final = (ExpertFormat.F32, ExpertFormat.BF16, ExpertFormat.INT8, ExpertFormat.INT4_G64)
"""Formats that any weights can be converted to; the others are taken over from checkpoints that have them."""


class DenseFormat(StrEnum):
    """Format of the dense matrices of a store; norms and routers keep their own precision."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8-e4m3"
    """As published: 8-bit floats with their block scales where the checkpoint has them, else bf16 or f32."""


class Activation(StrEnum):
    """What an expert does between gate, up and down."""

    SILU = "silu"
    """silu(gate) * up."""
    GPT_OSS = "gpt-oss"
    """g = min(gate, 7), u = up cut to -7..7: (u + 1) * g / (1 + exp(-1.702 g)); modeling_gpt_oss.py of transformers."""
    MODEL = "model"
    """What the model's own code says: only `tierd.integrations` runs such experts, which may have no gate."""
