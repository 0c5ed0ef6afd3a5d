"""How published tensors become a parameter of stacked experts: transformers' own rules, for one expert at a time.

Most checkpoints publish experts one by one; transformers stacks them, joins gate and up, transposes, or takes rows that
take turns apart. Its rules work on whole layers. Nearly all of them treat each expert alike, so they are applied to
one expert here, and memory stays at one expert. Where a rule mixes experts, one whole layer is in memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import core_model_loading as rules

from tierd.checkpoint.decode import block_scales
from tierd.checkpoint.finder import FP8_DTYPE
from tierd.checkpoint.reader import SourceTensor
from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.integrations.transformers.dequantise import fp8_values
from tierd.store.reading import read_exact
from tierd.store.shards import tensor_bytes

__all__ = ["TORCH_DTYPES", "Parameter", "collect"]

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_MATRIX: Final = 2
_ALIKE = ("Chunk", "Concatenate", "Interleave", "MergeModulelist", "Transpose")
"""Rules that treat each expert alike as long as they leave the first dimension alone."""


@dataclass(eq=False)
class Parameter:
    """One parameter [E, …] of a module with routed experts, or several that one rule makes together.

    Attributes:
        target: its name in the model, the first one's if there are several.
        converter: transformers' rule; None: the published tensor is the parameter.
        model: empty one, which some rules ask for shapes.
        sources: published tensors by the rule's patterns, in the order of the experts.
        scales: by the names of published tensors, those that hold 8-bit floats.
    """

    target: str
    converter: Any
    model: Any
    sources: dict[str, list[SourceTensor]] = field(default_factory=dict)
    scales: Mapping[str, SourceTensor] = field(default_factory=dict)
    _whole: dict[str, torch.Tensor] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tensors_of(self, expert: int, experts: int) -> list[SourceTensor]:
        """The published tensors from which an expert is made."""
        single = self._kind(experts) == "single"
        found = [
            tensor for listed in self.sources.values() for tensor in (listed[expert : expert + 1] if single else listed)
        ]
        return found + [self.scales[tensor.name] for tensor in found if tensor.name in self.scales]

    def names(self) -> list[str]:
        """Names in the model of all parameters that come from this rule."""
        if self.converter is None:
            return [self.target]
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]

    def read(self, name: str, expert: int, experts: int, config: Any) -> torch.Tensor:
        """One expert's part of a parameter, of the published type.

        Raises:
            StoreDamaged: the published tensors do not have the number of experts that the config says.
            DriveError: a source cannot be read.
        """
        kind = self._kind(experts)
        if kind == "whole":
            with self._lock:
                if self._whole is None:
                    self._whole = self._convert(
                        {
                            pattern: [self._read(tensor) for tensor in listed]
                            for pattern, listed in self.sources.items()
                        },
                        config,
                        self.model,
                    )
                return self._whole[name][expert]
        if kind == "single":
            given = {pattern: [self._read(listed[expert])] for pattern, listed in self.sources.items()}
        else:
            given = {pattern: [self._read(listed[0], expert)] for pattern, listed in self.sources.items()}
        if self.converter is None:
            return next(iter(given.values()))[0][0]
        return self._convert(given, config, _OneExpert(self.model))[name][0]

    def release(self) -> None:
        """Give back a whole layer that `read` kept."""
        with self._lock:
            self._whole = None

    def _kind(self, experts: int) -> str:
        """Whether experts are published `single`, `stacked`, or mixed by the rule: `whole`."""
        counts = {len(listed) for listed in self.sources.values()}
        alike = self.converter is None or all(_is_alike(rule) for rule in self.converter.operations)
        if not alike:
            return "whole"
        if counts == {1} and all(listed[0].shape[:1] == (experts,) for listed in self.sources.values()):
            return "stacked"
        if counts == {experts} and self.converter is not None:
            return "single"
        raise StoreDamaged(
            f"{self.target} has {experts} experts, but {min(counts)} tensors are published for it",
            hint="This looks like an incomplete download: compare the list of files with the published one.",
        )

    def _read(self, tensor: SourceTensor, row: int | None = None) -> torch.Tensor:
        """A published tensor, or [1, …]: one row of its first dimension; 8-bit floats as the float32 they stand for."""
        scales = self.scales.get(tensor.name)
        if scales is None:
            return _plain(tensor, row)
        codes = _bytes(tensor, row).view(torch.uint8)
        grid = _bytes(scales, row)
        wide = torch.from_numpy(block_scales(scales, grid.numpy())).view(_shape(scales, row))
        if codes.ndim == _MATRIX:
            return fp8_values(codes, wide)
        return torch.stack([fp8_values(*each) for each in zip(codes, wide, strict=True)])

    def _convert(self, given: dict[str, list[torch.Tensor]], config: Any, model: Any) -> dict[str, torch.Tensor]:
        """Tensors by full name; the rule's own patterns are replaced as transformers does it."""
        values: dict[str, Any] = given
        converter = copy.copy(self.converter)
        for rule in converter.operations:
            values = rule.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.target,
                model=model,
                config=config,
                missing_keys=None,
            )
        first = converter.target_patterns[0]
        found = {}
        for pattern, value in values.items():
            tensor = value[0] if isinstance(value, list) else value
            found[self.target.replace(first, pattern) if pattern in converter.target_patterns else pattern] = tensor
        return found


@dataclass(frozen=True, slots=True)
class _OneExpert:
    """The model as rules see it that are applied to one expert: its parameters have a first dimension of 1."""

    model: Any

    def get_parameter(self, name: str) -> torch.Tensor:
        """A parameter's shape, without memory."""
        return torch.empty((1, *self.model.get_parameter(name).shape[1:]), device="meta")


def collect(
    tensors: Mapping[str, SourceTensor],
    scales: Mapping[str, SourceTensor],
    model: Any,
    mapping: list[Any],
    wanted: set[str],
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Which published tensors make which parameters.

    Args:
        tensors: of the checkpoint, by name, without scales.
        scales: of those that hold 8-bit floats, by the same names.
        model: empty one.
        mapping: transformers' rules for it.
        wanted: names of parameters of routed experts.

    Returns:
        Parameters by each of their names in the model, and for all other published tensors what they are called there.

    Raises:
        UnsupportedModel: a wanted parameter is not published.
    """
    renamings = [rule for rule in mapping if isinstance(rule, rules.WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, rules.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, Parameter] = {}
    renamed: dict[str, str] = {}
    for name in sorted(tensors, key=rules.dot_natural_key):
        target, pattern = rules.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rules.rename_source_key(name, [], [], prefix, state)
        converter = None if pattern is None else by_pattern[pattern]
        names = [target]
        if converter is not None:
            first, *others = converter.target_patterns
            names += [target.replace(first, other) for other in others]
        if not wanted.intersection(names):
            renamed[name] = target
            continue
        parameter = found.setdefault(target, Parameter(target, converter, model, scales=scales))
        parameter.sources.setdefault(name if pattern is None else pattern, []).append(tensors[name])
    by_name = {each: parameter for parameter in found.values() for each in parameter.names()}
    lost = sorted(wanted - set(by_name))
    if lost:
        raise UnsupportedModel(
            f"{lost[0]} is not in the checkpoint under any name that transformers knows",
            hint="The checkpoint is incomplete, or of a version that this version of transformers does not read.",
        )
    return by_name, renamed


def _is_alike(rule: Any) -> bool:
    if type(rule).__name__ not in _ALIKE:
        return False
    if type(rule).__name__ == "MergeModulelist":
        return bool(rule.dim == 0)
    dims = [rule.dim0, rule.dim1] if type(rule).__name__ == "Transpose" else [rule.dim]
    return all(dim not in (0, -3) for dim in dims)


def _shape(tensor: SourceTensor, row: int | None) -> tuple[int, ...]:
    return tensor.shape if row is None else (1, *tensor.shape[1:])


def _bytes(tensor: SourceTensor, row: int | None) -> torch.Tensor:
    """The bytes of a tensor, uint8: flat for scales, in the tensor's shape for codes of one byte."""
    size = tensor.nbytes if row is None else tensor_bytes(tensor.dtype, tensor.shape[1:])
    data = torch.from_numpy(read_exact(tensor.path, tensor.offset + (row or 0) * size, size))
    return data.view(_shape(tensor, row)) if tensor.dtype == FP8_DTYPE else data


def _plain(tensor: SourceTensor, row: int | None) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedModel(
            f"{tensor.path}: tensor {tensor.name} has the dtype {tensor.dtype}; F32, BF16 and F16 are read",
            hint="Use the model's unquantised release; tierd quantises with --experts int8 or int4-g64.",
        )
    return _bytes(tensor, row).view(dtype).view(_shape(tensor, row))
