"""Looks tensors of a checkpoint up by name, checks what they are, and knows what is missing or left over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierd.checkpoint.quantisation import Coding
from tierd.checkpoint.reader import missing_tensors
from tierd.errors import StoreDamaged, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierd.checkpoint.mapping import FamilyMapping
    from tierd.checkpoint.quantisation import Quantisation
    from tierd.checkpoint.reader import Checkpoint, SourceTensor

__all__ = ["FLOAT_DTYPES", "FP8_DTYPE", "KEPT_DTYPES", "SCALE_DTYPES", "Finder"]

FLOAT_DTYPES: Final = ("F32", "BF16", "F16")
FP8_DTYPE: Final = "F8_E4M3"
KEPT_DTYPES: Final = (*FLOAT_DTYPES, FP8_DTYPE, "I64", "I32", "U8")
"""Of tensors that are stored as they are."""
SCALE_DTYPES: Final = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""Of fp8 blocks; the last two are powers of two."""


class Finder:
    """The tensors of one checkpoint, and which of them have been taken.

    Args:
        checkpoint: opened.
        mapping: its family.
        quantisation: what its config says about codes.
    """

    def __init__(self, checkpoint: Checkpoint, mapping: FamilyMapping, quantisation: Quantisation) -> None:
        self._checkpoint, self._mapping = checkpoint, mapping
        self.quantisation = quantisation
        self._used: set[str] = set()
        self._missing: list[str] = []

    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor of that name."""
        return name in self._checkpoint.tensors

    def took(self, name: str) -> bool:
        """True if the tensor has been taken."""
        return name in self._used

    def dtype(self, name: str) -> str:
        """Type of a tensor that is there."""
        return self._checkpoint.tensors[name].dtype

    def lack(self, names: Iterable[str]) -> bool:
        """Notes those names that the checkpoint does not have; True if there are any."""
        lost = [name for name in names if not self.has(name)]
        self._missing += lost
        return bool(lost)

    def take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOAT_DTYPES) -> SourceTensor:
        """A tensor that is there.

        Raises:
            StoreDamaged: it has another shape than the config says.
            UnsupportedModel: it has another type.
        """
        tensor = self._checkpoint.tensors[name]
        if tensor.shape != shape:
            raise StoreDamaged(
                f"{tensor.path}: tensor {name} has the shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        if tensor.dtype not in dtypes:
            wanted = " and ".join([", ".join(dtypes[:-1]), dtypes[-1]]) if len(dtypes) > 1 else dtypes[0]
            raise UnsupportedModel(f"{tensor.path}: tensor {name} has the dtype {tensor.dtype}; {wanted} are read")
        self._used.add(name)
        return tensor

    def is_fp8(self, name: str) -> bool:
        """True if a tensor that is there holds 8-bit floats; UnsupportedModel if the config does not say so."""
        if self.dtype(name) != FP8_DTYPE:
            return False
        self.expect(Coding.FP8, name)
        return True

    def take_fp8_scales(self, name: str, rows: int, cols: int) -> SourceTensor | None:
        """The scales of a matrix of 8-bit floats; None, noted as missing, if they are not there."""
        scales = f"{name}_scale_inv"
        if self.lack([scales]):
            return None
        block = self.quantisation.group_size
        return self.take(scales, (-(-rows // block), -(-cols // block)), SCALE_DTYPES)

    def expect(self, coding: Coding, name: str) -> None:
        """UnsupportedModel, naming a tensor, unless the config says that matrices have such codes."""
        if self.quantisation.coding is not coding:
            raise UnsupportedModel(
                f"{self._checkpoint.tensors[name].path}: tensor {name} holds {coding} codes; "
                "quantization_config in config.json does not say so"
            )

    def twice(self, first: str, second: str) -> StoreDamaged:
        """The error for weights that are there under two names."""
        return StoreDamaged(
            f"{self._checkpoint.folder}: the same weights are there twice, as {first} and as {second}",
            hint="Remove one of the two copies; which one is right cannot be told from here.",
        )

    def finish(self) -> None:
        """Refuses missing and left-over tensors, naming them."""
        checkpoint = self._checkpoint
        if self._missing:
            raise missing_tensors(checkpoint.folder, self._missing, len(checkpoint.tensors), len(checkpoint.headers))
        tied = checkpoint.config.flag("tie_word_embeddings", default=False)
        extra = [
            name
            for name in checkpoint.tensors
            if name not in self._used and not self._mapping.skips(name) and not (tied and name == "lm_head.weight")
        ]
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise UnsupportedModel(
                f"{checkpoint.folder}: {len(extra)} tensors that {self._mapping.family} does not know: {shown}",
                hint="Leaving tensors out could change every token, so it is not guessed.",
            )
