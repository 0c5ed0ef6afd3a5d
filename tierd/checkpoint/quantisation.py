"""What config.json says about a checkpoint that is published quantised: which codes its matrices may be stored in.

A single matrix may still be plain (`modules_to_not_convert`, `ignore`): what it is, is read from the names that are
there. The config says what the codes mean, and whatever it says that is not understood is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from tierd.errors import UnsupportedModel
from tierd.store.formats import ExpertFormat
from tierd.store.records import FP8_BLOCK, MICRO_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierd.checkpoint.config import Config

__all__ = ["Coding", "Quantisation"]

_FP8_KEYS: Final = {
    "activation_scheme",
    "dequantize",
    "fmt",
    "modules_to_not_convert",
    "scale_fmt",
    "weight_block_size",
}
_MXFP4_KEYS: Final = {"dequantize", "modules_to_not_convert"}
_PACKED_KEYS: Final = {
    "config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme", "quantization_status",
    "sparsity_config", "transform_config", "version",
}  # fmt: skip
_WEIGHT_KEYS: Final = {
    "actorder", "block_structure", "dynamic", "group_size", "num_bits", "observer", "observer_kwargs", "scale_dtype",
    "strategy", "symmetric", "type", "zp_dtype",
}  # fmt: skip


class Coding(StrEnum):
    """How a matrix is published."""

    PLAIN = "plain"
    """Numbers of 16 or 32 bits."""
    FP8 = "fp8"
    """8-bit floats (E4M3) with one scale per 128 x 128."""
    MXFP4 = "mxfp4"
    """4-bit floats, neighbours in one byte, with a power of two per 32 columns."""
    INT4 = "int4"
    """4-bit whole numbers plus 8, eight in an int32, with one bfloat16 scale per group of columns."""

    @property
    def stored(self) -> ExpertFormat | None:
        """The format that keeps such codes as they are; None for plain numbers."""
        return _STORED.get(self)


_STORED: Final = {Coding.FP8: ExpertFormat.FP8, Coding.MXFP4: ExpertFormat.MXFP4, Coding.INT4: ExpertFormat.INT4_G32}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The codes of a checkpoint.

    Attributes:
        coding: of the matrices that are not plain.
        group_size: columns that share a scale; 0 for plain checkpoints.
    """

    coding: Coding
    group_size: int = 0

    @classmethod
    def read(cls, config: Config) -> Quantisation:
        """Reads `quantization_config`.

        Raises:
            UnsupportedModel: a method or a setting that is not understood; it is named.
        """
        table = config.table.get("quantization_config")
        if not table:
            return cls(Coding.PLAIN)
        if not isinstance(table, dict):
            raise UnsupportedModel(f"{config.where}: quantization_config is not an object")
        reader = _Reader(table, f"{config.where}: quantization_config")
        match table.get("quant_method"):
            case "fp8":
                return reader.fp8()
            case "mxfp4":
                reader.known(_MXFP4_KEYS)
                return cls(Coding.MXFP4, MICRO_GROUP)
            case "compressed-tensors":
                return reader.packed()
            case method:
                raise UnsupportedModel(
                    f"{config.where}: the checkpoint is quantised by a method that is not known: {method!r}",
                    hint="fp8 in blocks of 128 x 128, mxfp4 and compressed-tensors (pack-quantized, 4 bits) are read; "
                    "else use the model's unquantised release.",
                )


class _Reader:
    """Settings of one object of the config; each that is not understood is refused by name."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self._where = table, where

    def known(self, names: set[str]) -> None:
        """Refuses settings beside these that are switched on."""
        for name, value in self._table.items():
            if name not in names and name != "quant_method" and value not in (None, False, "", [], {}):
                raise self._refuse(name, "this setting is not known")

    def want(self, name: str, *values: Any) -> None:
        """Refuses any other value; an absent setting counts as None."""
        if self._table.get(name) not in values:
            raise self._refuse(name, f"{' or '.join(map(repr, values))} is wanted")

    def fp8(self) -> Quantisation:
        """Blocks of 128 x 128 weights with one scale."""
        self.known(_FP8_KEYS)
        self.want("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
        self.want("fmt", None, "e4m3", "float8_e4m3fn")
        self.want("scale_fmt", None, "ue8m0")
        self.want("activation_scheme", None, "dynamic")
        return Quantisation(Coding.FP8, FP8_BLOCK)

    def packed(self) -> Quantisation:
        """The form that compressed-tensors calls pack-quantized: 4 bits, symmetric, a scale per group of a row."""
        self.known(_PACKED_KEYS)
        self.want("format", "pack-quantized")
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            self.want(name, None, {})
        groups = self._table.get("config_groups")
        if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
            raise self._refuse("config_groups", "one or more groups are wanted")
        sizes = {_Reader(group, f"{self._where}.config_groups.{name}").group() for name, group in groups.items()}
        if len(sizes) != 1:
            raise self._refuse("config_groups", "groups of one size are wanted")
        return Quantisation(Coding.INT4, sizes.pop())

    def group(self) -> int:
        """Columns that share a scale, of one of the groups."""
        self.known({"format", "input_activations", "output_activations", "targets", "weights"})
        self.want("format", None, "pack-quantized")
        self.want("input_activations", None)
        self.want("output_activations", None)
        weights = self._table.get("weights")
        if not isinstance(weights, dict):
            raise self._refuse("weights", "an object is wanted")
        reader = _Reader(weights, f"{self._where}.weights")
        reader.known(_WEIGHT_KEYS)
        for name, values in (
            ("num_bits", (4,)),
            ("type", ("int",)),
            ("symmetric", (True,)),
            ("strategy", ("group",)),
            ("actorder", (None, "static")),
            ("dynamic", (None, False)),
            ("block_structure", (None,)),
        ):
            reader.want(name, *values)
        size = weights.get("group_size")
        if type(size) is not int or size < MICRO_GROUP or size % MICRO_GROUP or size > 1 << 16:
            raise reader._refuse("group_size", f"a multiple of {MICRO_GROUP} is wanted")
        return size

    def _refuse(self, name: str, reason: str) -> UnsupportedModel:
        shown = str(self._table.get(name))[:200]
        return UnsupportedModel(
            f"{self._where}.{name} is {shown}: {reason}",
            hint="What the codes mean is not guessed; use another release of the model.",
        )
