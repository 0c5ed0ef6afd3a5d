"""Conversion of models that have no mapping here: somebody else's rules say how published tensors become experts.

The rules come as a `GenericModel`: for each expert a function that reads its matrices in the form that records have.
All other tensors are dense and keep their published names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.checkpoint.finder import FLOAT_DTYPES, FP8_DTYPE
from tierd.checkpoint.mapping import DenseSpec
from tierd.checkpoint.plan import MADE_DENSE, NATIVE, ConversionPlan, known_format, native_format, plan_dense
from tierd.checkpoint.quantise import bf16_to_f32, f32_to_bf16, quantise_int4, quantise_int8
from tierd.errors import UnsupportedModel, UsageError
from tierd.store.formats import MADE_FORMATS, Activation, DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.reading import aligned_buffer
from tierd.store.records import RecordLayout, expert_layout
from tierd.store.writing import plan_expert_shards

if TYPE_CHECKING:
    from pathlib import Path

    from tierd.checkpoint.reader import SourceTensor
    from tierd.store.manifest import Interface

__all__ = ["WHOLE_DTYPES", "GenericExpert", "GenericLayer", "GenericModel", "plan_generic"]

WHOLE_DTYPES: Final = ("I64", "I32", "U8")
"""Types of tables that are kept as they are."""
_POWERS: Final = ("F8_E8M0", "U8")
"""Types of scales that are powers of two."""
_MAX_SIZE: Final = 1 << 24
"""The largest dimension that a store can express."""


@dataclass(frozen=True, slots=True, eq=False)
class GenericExpert:
    """One expert of a published checkpoint.

    Attributes:
        name: for messages.
        tensors: published tensors that it is made from.
        read: gives gate [I, H] (if there is one), up [I, H] and down [H, I], float32 or uint16 (the bits of bf16),
            and for biases "up.bias" and so on, float32 [rows].
    """

    name: str
    tensors: tuple[SourceTensor, ...]
    read: Callable[[], Mapping[str, np.ndarray]]

    @property
    def paths(self) -> frozenset[Path]:
        """Files that it is made from."""
        return frozenset(tensor.path for tensor in self.tensors)

    def encode(self, layout: RecordLayout) -> np.ndarray:
        """The record of the expert: uint8 [record_bytes], padding zero.

        Raises:
            DriveError: the source cannot be read.
            UsageError: a weight cannot be quantised.
        """
        record = aligned_buffer(layout.record_bytes)
        record[:] = 0
        views = layout.views(record)
        try:
            for name, values in self.read().items():
                _encode(values, ExpertFormat(layout.format), views, name)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error.message}", hint=error.hint) from None
        return record


@dataclass(frozen=True, slots=True, eq=False)
class GenericLayer:
    """The routed experts of one layer: its number, H, I, whether there are gates and biases, and the experts."""

    layer: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    biased: bool
    experts: list[GenericExpert]


@dataclass(frozen=True, slots=True, eq=False)
class GenericModel:
    """A checkpoint that was understood by somebody else's rules.

    Attributes:
        family: a short name.
        tensors: all published tensors but scales, by published name.
        scales: of tensors that hold 8-bit floats, by the names of these.
        layers: with routed experts, rising.
        top_k: experts of a token.
        vocab_size: rows of the embedding.
        matrices: names of published tensors that are plain matrices, which `--dense` may shorten; others never are.
        interface: what the store keeps, so that the model's own code finds its experts.
    """

    family: str
    tensors: Mapping[str, SourceTensor]
    scales: Mapping[str, SourceTensor]
    layers: list[GenericLayer]
    top_k: int
    vocab_size: int
    matrices: frozenset[str]
    interface: Interface

    @property
    def experts(self) -> list[GenericExpert]:
        """All experts in flat order."""
        return [expert for layer in self.layers for expert in layer.experts]


def plan_generic(model: GenericModel, *, experts: str, dense: str, shard_bytes: int) -> ConversionPlan:
    """Chooses formats and cuts the output into shards, as `plan_conversion` does for known families.

    Raises:
        UsageError: an unknown format.
        UnsupportedModel: a tensor that a store cannot hold; it is named.
    """
    known_format(experts, [NATIVE, *MADE_FORMATS], "--experts")
    known_format(dense, [NATIVE, *MADE_DENSE], "--dense")
    used = {tensor.name for expert in model.experts for tensor in expert.tensors}
    others = {name: tensor for name, tensor in model.tensors.items() if name not in used}
    for name, tensor in others.items():
        _check_dense(tensor, coded=name in model.scales)
    remarks: list[str] = []
    expert_dtypes = {_exact_dtype(model, name) for name in used if name in model.tensors}
    expert_format = ExpertFormat(native_format(experts, expert_dtypes, "experts", remarks))
    kinds = {tensor.dtype for name, tensor in others.items() if name in model.matrices}
    plain = native_format(dense, kinds - {FP8_DTYPE}, "dense tensors", remarks)
    dense_format = DenseFormat.FP8 if dense == NATIVE and FP8_DTYPE in kinds else DenseFormat(plain)
    geometry = _geometry(model, expert_format)
    sources = {
        name: (tensor, DenseSpec(tensor.shape, keep_precision=name not in model.matrices))
        for name, tensor in others.items()
    }
    return ConversionPlan(
        model,
        geometry,
        expert_format,
        dense_format,
        plan_dense(sources, dense_format, shard_bytes, scales=model.scales),
        plan_expert_shards(geometry, shard_bytes),
        remarks,
        model.interface,
    )


def _geometry(model: GenericModel, expert_format: ExpertFormat) -> Geometry:
    layouts: list[RecordLayout] = []
    entries = []
    for layer in model.layers:
        layout = expert_layout(
            expert_format,
            layer.hidden_size,
            layer.intermediate_size,
            activation=Activation.MODEL,
            biases=layer.biased,
            gated=layer.gated,
        )
        if layout not in layouts:
            layouts.append(layout)
        entries.append(ExpertLayer(layer=layer.layer, experts=len(layer.experts), layout=layouts.index(layout)))
    return Geometry(
        hidden_size=model.layers[0].hidden_size,
        intermediate_size=model.layers[0].intermediate_size,
        top_k=model.top_k,
        vocab_size=model.vocab_size,
        layers=tuple(entries),
        layouts=tuple(layouts),
    )


def _exact_dtype(model: GenericModel, name: str) -> str:
    """The smallest type that holds a tensor's values exactly; of 8-bit floats bf16 if scales are powers of two."""
    scales = model.scales.get(name)
    if scales is None:
        return model.tensors[name].dtype
    return "BF16" if scales.dtype in _POWERS else "F32"


def _check_dense(tensor: SourceTensor, *, coded: bool) -> None:
    if tensor.dtype not in (*FLOAT_DTYPES, *WHOLE_DTYPES) and not coded:
        raise UnsupportedModel(f"{tensor.path}: tensor {tensor.name} has the dtype {tensor.dtype}: no store holds it")
    if any(not 1 <= size <= _MAX_SIZE for size in tensor.shape):
        raise UnsupportedModel(
            f"{tensor.path}: tensor {tensor.name} has the shape {list(tensor.shape)}; "
            f"a store holds dimensions from 1 to {_MAX_SIZE}"
        )


def _encode(values: np.ndarray, wanted: ExpertFormat, views: dict[str, np.ndarray], name: str) -> None:
    if name.endswith(".bias"):
        views[name][...] = values
        return
    if values.shape[0] != views[name].shape[0]:
        raise UnsupportedModel(f"matrix {name} has {values.shape[0]} rows, its record {views[name].shape[0]}")
    if wanted is ExpertFormat.BF16:
        views[name][...] = values if values.dtype == np.uint16 else f32_to_bf16(values)
        return
    weights = bf16_to_f32(values) if values.dtype == np.uint16 else values
    match wanted:
        case ExpertFormat.F32:
            views[name][...] = weights
        case ExpertFormat.INT8:
            views[name][...], views[f"{name}.scales"][...] = quantise_int8(weights)
        case ExpertFormat.INT4_G64:
            views[name][...], views[f"{name}.scales"][...] = quantise_int4(weights)
        case _:
            raise UsageError(f"{wanted} is taken over from checkpoints that have it, and cannot be made")
