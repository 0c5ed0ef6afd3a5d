"""Routed experts that lie as on transformers' interface, in modules that are not on it: known by their class.

Their own code computes on stacked parameters as that of a decorated module would. A model gets them onto the interface
before anything else looks at it: the attributes that say how parameters lie, and a forward that speaks of chosen
experts. What they compute was compared with the unmodified model's answer (ARCHITECTURES.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

__all__ = ["adopt"]

Apply = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The experts function of the interface: module, hidden states, experts, weights."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """How a class of modules gets onto the interface.

    Attributes:
        forward: of the module, with the experts function as its second argument.
        attributes: the interface's own, where they are not `_USUAL`.
    """

    forward: Callable[..., torch.Tensor]
    attributes: Mapping[str, bool]


_USUAL: Final = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


def adopt(model: nn.Module, apply: Apply) -> None:
    """Put a model's known modules onto the interface.

    Args:
        model: of transformers; only its modules of a known class are changed.
        apply: the experts function that they call.
    """
    for module in model.modules():
        adapter = _KNOWN.get(type(module).__name__)
        if adapter is None:
            continue
        for name, value in (_USUAL | dict(adapter.attributes)).items():
            setattr(module, name, value)
        if not hasattr(module, "_apply_gate"):
            module._apply_gate = partial(_gate, module)  # noqa: SLF001
        module.forward = partial(adapter.forward, module, apply)


def _gate(module: Any, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return up * module.act_fn(gate)


def _as_given(
    module: nn.Module,
    apply: Apply,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """A forward whose arguments are those of the interface already."""
    return apply(module, hidden_states, top_k_index, top_k_weights)


def _all_experts(module: Any, apply: Apply, hidden_states: torch.Tensor) -> torch.Tensor:
    """Llama 4 calls every expert with every token, multiplied by its score, which is zero for those not chosen.

    Args:
        module: of E experts.
        apply: the experts function.
        hidden_states: [E x tokens, H], expert by expert. An expert gives zeros for a row of zeros.
    """
    experts = module.num_experts
    chosen = (hidden_states != 0).any(dim=-1).nonzero()[:, 0]
    answer = torch.zeros_like(hidden_states)
    if len(chosen):
        expert = (chosen // (len(hidden_states) // experts))[:, None]
        weights = torch.ones_like(expert, dtype=hidden_states.dtype)
        answer[chosen] = apply(module, hidden_states[chosen], expert, weights)
    return answer


_KNOWN: Final[Mapping[str, _Adapter]] = {
    "Llama4TextExperts": _Adapter(_all_experts, {"is_transposed": True}),
    "Step3p7Experts": _Adapter(_as_given, {}),
}
