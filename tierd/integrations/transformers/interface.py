"""The experts interface of transformers 5: which modules of a model are on it, and how their weights are laid out.

A class under `@use_experts_implementation` (transformers.integrations.moe) looks its forward up in a registry and says
in attributes how its parameters lie: `has_gate`, `has_bias`, `is_transposed`, `is_concatenated`. All experts of a
module are stacked along the first dimension of each parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from tierd.errors import UnsupportedModel

__all__ = ["ExpertsModule", "experts_modules", "is_on_interface"]

_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """One module with routed experts.

    Attributes:
        path: its name inside the model.
        layer: its number in the store: the model's own layer number where each layer has one such module at most.
        module: itself.
        experts: E.
        input_size: width of the rows that experts are applied to.
        intermediate_size: width between the projections.
        parameters: names of its parameters [E, …], in the order up, down, biases.
    """

    path: str
    layer: int
    module: nn.Module
    experts: int
    input_size: int
    intermediate_size: int
    parameters: tuple[str, ...]

    @property
    def has_gate(self) -> bool:
        """Gate and up projection are one parameter, and the module's own function joins what they give."""
        return bool(self.module.has_gate)

    @property
    def has_bias(self) -> bool:
        """Both projections have a bias."""
        return bool(self.module.has_bias)

    def description(self) -> dict[str, Any]:
        """What a store keeps of the module, for its manifest."""
        return {
            "path": self.path,
            "layer": self.layer,
            "has_gate": self.has_gate,
            "has_bias": self.has_bias,
        }


def is_on_interface(module: nn.Module) -> bool:
    """Whether a module's experts can be computed by a registered function."""
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def experts_modules(model: nn.Module) -> list[ExpertsModule]:
    """All modules of a model that are on the interface, in the order of their layers.

    Raises:
        UnsupportedModel: there are none, or one has parameters that the interface does not speak of.
    """
    found = [(path, module) for path, module in model.named_modules() if is_on_interface(module)]
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps no routed experts behind transformers' experts interface",
            hint="Only architectures whose experts are decorated with use_experts_implementation can be served.",
        )
    numbers = _layer_numbers([path for path, _ in found])
    modules = [_examine(path, number, module) for (path, module), number in zip(found, numbers, strict=True)]
    return sorted(modules, key=lambda each: each.layer)


def _layer_numbers(paths: list[str]) -> list[int]:
    """The last number of each path, where that tells them apart, else their order."""
    found = [_NUMBER.findall(path) for path in paths]
    numbers = [int(each[-1]) if each else -1 for each in found]
    if -1 in numbers or Counter(numbers).most_common(1)[0][1] > 1:
        return list(range(len(paths)))
    return numbers


def _examine(path: str, layer: int, module: nn.Module) -> ExpertsModule:
    wanted = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    if module.has_bias:
        wanted += [f"{name}_bias" for name in wanted]
    shapes = {name: tuple(getattr(module, name).shape) for name in wanted if hasattr(module, name)}
    lost = [name for name in wanted if name not in shapes]
    if lost:
        raise UnsupportedModel(f"{path} ({type(module).__name__}) has no parameter {lost[0]}")
    experts = shapes[wanted[0]][0]
    others = [
        name
        for name, value in module.named_parameters(recurse=False)
        if name not in wanted and value.ndim and value.shape[0] == experts
    ]
    if others:
        raise UnsupportedModel(
            f"{path} ({type(module).__name__}) keeps {others[0]} for each expert, which the interface does not speak of"
        )
    up, down = shapes[wanted[0]], shapes[wanted[1]]
    if module.is_transposed:
        up, down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
    width = up[1] // 2 if module.has_gate else up[1]
    if down != (experts, up[2], width):
        raise UnsupportedModel(f"{path}: {wanted[0]} {list(up)} and down_proj {list(down)} do not fit each other")
    return ExpertsModule(path, layer, module, experts, up[2], width, tuple(wanted))
