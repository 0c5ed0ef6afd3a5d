"""Which experts the next layer will probably want: its own router, applied to what this layer's experts are given.

It is a guess, since attention lies between; it changes how fast an expert comes and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from tierd.client.source import ExpertSource
from tierd.integrations.transformers.interface import ExpertsModule

__all__ = ["NextRouter", "find_router"]

_MOST_TOKENS: Final = 8
"""More tokens want nearly every expert of a layer: nothing is to be guessed then."""
_LEAST_PROBABILITY: Final = 0.02
_MOST_EXPERTS: Final = 64


@dataclass(frozen=True, slots=True)
class NextRouter:
    """The router of a layer to come.

    Attributes:
        layer: of its experts.
        experts: how many.
        router: a module with `weight` [experts or more, H].
        top_k: experts of a token, as far as that is known.
    """

    layer: int
    experts: int
    router: nn.Module
    top_k: int

    def hint(self, source: ExpertSource, hidden: torch.Tensor, *, step: int, lead_seconds: float) -> None:
        """Tell a source what is likely, if it listens and something likely is not in RAM.

        Args:
            source: brings the experts.
            hidden: [tokens, H], given to the experts of the layer before.
            step: in which they will be wanted.
            lead_seconds: until then.
        """
        if len(hidden) > _MOST_TOKENS or source.absent(self.layer) is None:
            return
        weight = self.router.weight
        logits = functional.linear(hidden.to(weight.dtype), weight)[:, : self.experts].float()
        odds = (self.top_k * torch.softmax(logits, dim=-1)).clamp(max=1).amax(dim=0)
        likely, experts = torch.topk(odds, min(2 * self.top_k * len(hidden), self.experts, _MOST_EXPERTS))
        chosen = [
            (expert, odd)
            for expert, odd in zip(experts.tolist(), likely.tolist(), strict=True)
            if odd >= _LEAST_PROBABILITY
        ]
        if chosen:
            source.hint(
                self.layer,
                [expert for expert, _ in chosen],
                [odd for _, odd in chosen],
                step=step,
                lead_seconds=lead_seconds,
            )


def find_router(model: nn.Module, target: ExpertsModule, top_k: int) -> NextRouter | None:
    """The router beside a module's experts; None if there is none whose shape says so."""
    parent = model.get_submodule(target.path.rpartition(".")[0])
    for child in parent.children():
        weight = getattr(child, "weight", None)
        if child is target.module or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            continue
        if weight.shape[0] >= target.experts and weight.shape[1] == target.input_size and weight.is_floating_point():
            exact = weight.shape[0] - target.experts <= 8  # shared experts may stand behind the routed ones
            if exact and ("gate" in _name_of(parent, child) or "router" in _name_of(parent, child)):
                return NextRouter(target.layer, target.experts, child, top_k)
    return None


def _name_of(parent: nn.Module, child: nn.Module) -> str:
    return str(next(name for name, module in parent.named_children() if module is child))
