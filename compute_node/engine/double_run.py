"""The reference's own code in float64: transformers runs an oracle folder again, and its routers are moved a little.

Imported only where it is wanted: it needs the extra `torch`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from compute_node.engine.near_ties import DoubleRun
from compute_node.engine.oracle import OracleReference
from tierd.integrations.transformers.architecture import config_of, model_class, quiet

__all__ = ["double_run"]

_MOVES: Final = 32
"""How often a router's input and weights are moved to see whether its choice hinges on rounding."""
_FARTHER: Final = 2.0
"""Moves go so many times as far as float32 went from float64."""
_ROUTERS: Final = ("TopKRouter", "TopkRouter")


class _Heard:
    """What went into a model's routers, and what they chose, in the order of their layers.

    Attributes:
        inputs: by layer [tokens, H].
        modules: by layer the router, and the other arguments of its call.
        choices: by layer int [tokens, k].
    """

    def __init__(self) -> None:
        self.inputs: dict[int, torch.Tensor] = {}
        self.modules: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self.choices: dict[int, torch.Tensor] = {}

    def listen(self, model: Any) -> list[Any]:
        """Hooks on every router."""
        hooks = []
        for name, module in model.named_modules():
            if type(module).__name__.endswith(_ROUTERS):
                layer = int([part for part in name.split(".") if part.isdigit()][-1])
                hooks.append(module.register_forward_hook(self._hook(layer)))
        return hooks

    def _hook(self, layer: int) -> Any:
        def note(module: Any, arguments: tuple[Any, ...], answer: tuple[torch.Tensor, ...]) -> None:
            self.inputs[layer] = arguments[0].detach().clone()
            self.modules[layer] = (module, arguments[1:])
            self.choices[layer] = answer[2].reshape(-1, answer[2].shape[-1])

        return note


def double_run(folder: Path, reference: OracleReference) -> DoubleRun:
    """Runs a folder's checkpoint in float32 and in float64 over the prompt and the reference's greedy tokens.

    Both models are in memory at once: this is for tiny checkpoints.

    Raises:
        UnsupportedModel: transformers does not know the architecture.
    """
    config = config_of(folder)
    with quiet():
        single = model_class(config).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    double = copy.deepcopy(single.eval()).double()
    ids = torch.tensor([[*reference.input_ids, *reference.greedy[:-1]]])
    heard = []
    for model in (single, double):
        ear = _Heard()
        hooks = ear.listen(model)
        with torch.no_grad(), quiet():
            logits = model(input_ids=ids, use_cache=False).logits[0].double().numpy()
        for hook in hooks:
            hook.remove()
        heard.append(ear)
    routes = {layer: _choices(heard[1], layer, heard[0].inputs[layer]) for layer in heard[1].choices}
    return DoubleRun(f"float64 in transformers {transformers.__version__}", logits, routes)


def _choices(heard: _Heard, layer: int, rounded: torch.Tensor) -> list[set[tuple[int, ...]]]:
    """For each token what the router chooses at its float64 input and around it."""
    module, others = heard.modules[layer]
    exact = heard.inputs[layer]
    rows = exact.reshape(-1, exact.shape[-1])
    distance = (rows - rounded.reshape(rows.shape).double()).abs().amax(dim=-1, keepdim=True)
    finest = torch.finfo(torch.float32).eps * rows.abs().amax(dim=-1, keepdim=True)
    reach = _FARTHER * torch.maximum(distance, finest)
    generator = torch.Generator().manual_seed(0)

    def moves(like: torch.Tensor) -> torch.Tensor:
        return 2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1

    kept = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    found = [{tuple(sorted(chosen))} for chosen in heard.choices[layer].tolist()]
    with torch.no_grad():
        for _ in range(_MOVES):
            for parameter, value in kept:  # moving the input alone would keep experts with the same row a tie
                parameter.copy_(value * (1 + torch.finfo(torch.float32).eps * moves(value)))
            answer = module((rows + reach * moves(rows)).reshape(exact.shape), *others)
            for known, chosen in zip(found, answer[2].reshape(len(found), -1).tolist(), strict=True):
                known.add(tuple(sorted(chosen)))
        for parameter, value in kept:
            parameter.copy_(value)
    return found
