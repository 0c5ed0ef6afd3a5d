"""Names of the number formats in which a store keeps weights."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Activation", "DenseFormat", "ExpertFormat"]


class ExpertFormat(StrEnum):
    """Format of the routed experts of a store."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    """int8 codes with one float32 scale per output row."""
    INT4_G64 = "int4-g64"
    """4-bit codes with one float16 scale per 64 columns of a row."""


class DenseFormat(StrEnum):
    """Format of the dense matrices of a store; norms and routers keep their own precision."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"


class Activation(StrEnum):
    """What an expert does between gate, up and down."""

    SILU = "silu"
    """silu(gate) * up."""
    GPT_OSS = "gpt-oss"
    """g = min(gate, 7), u = up cut to -7..7: (u + 1) * g / (1 + exp(-1.702 g)); modeling_gpt_oss.py of transformers."""
