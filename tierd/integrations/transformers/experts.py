"""The experts function that is registered with transformers: routed experts of a module, weights from a source.

Each expert's output goes into rows of its own, and a token's rows are added in router order when all are there: what is
in which tier, and what comes first, changes no bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tierd.client.source import ExpertSource, Phase
from tierd.errors import UsageError
from tierd.integrations.transformers.hints import NextRouter
from tierd.integrations.transformers.interface import ExpertsModule
from tierd.integrations.transformers.records import ExpertWeights, RecordReader
from tierd.integrations.transformers.vram import DeviceTier

__all__ = ["BINDING", "BoundExperts", "ExpertsRuntime", "StepCancelled", "tiered_experts"]

BINDING = "tierd_experts"
"""Attribute of an experts module that is bound to a store."""


class StepCancelled(Exception):
    """A forward pass was given up between two layers, because that was wished for."""


def tiered_experts(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts of `self`.

    Args:
        self: a module on the interface that `load` bound to a store.
        hidden_states: [tokens, H].
        top_k_index: integer [tokens, k], experts in router order; a number beyond the last expert is no expert.
        top_k_weights: [tokens, k].

    Returns:
        [tokens, H], of the type of `hidden_states`.

    Raises:
        UsageError: the module is not bound, or gradients are wanted.
        TierdError: of the source.
    """
    bound: BoundExperts | None = getattr(self, BINDING, None)
    if bound is None:
        raise UsageError(
            f"{type(self).__name__} has no experts of a store",
            hint='Load the model with tierd.integrations.transformers.load; "tierd" is for such models only.',
        )
    if hidden_states.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "gradients are wanted of experts that are read only",
            hint="Run under torch.no_grad(): a model with experts from tierd cannot be trained.",
        )
    with torch.no_grad():
        return bound.forward(hidden_states, top_k_index, top_k_weights)


class ExpertsRuntime:
    """What all bound modules of a model share: the source, the step's number, and the device tier.

    One forward pass at a time: a second thread waits.

    Args:
        source: brings the experts.
        device_tier: keeps experts on the model's device; None: nothing is kept.
        hints: tell the source which experts the next layer will probably want.

    Attributes:
        step: number of the forward pass.
        experts_chosen: unique experts that routers chose, summed over layers and steps; counted here.
        cancelled: asked before each layer; True gives the pass up with `StepCancelled`.
        decoding: whether the pass in progress is one of single tokens; None: seen by its rows.
        wait_seconds: of all layers; see `SourceStats.wait_seconds`.
    """

    def __init__(self, source: ExpertSource, *, device_tier: DeviceTier | None, hints: bool) -> None:
        self.source = source
        self.device_tier = device_tier
        self.hints = hints
        self.step = 0
        self.experts_chosen = 0
        self.cancelled: Callable[[], bool] | None = None
        self.decoding: bool | None = None
        self.lock = threading.Lock()
        self._last_layer = -1
        self._begun = time.perf_counter()
        self._pace = 0.0

    def enter(self, layer: int) -> None:
        """A module is about to run; modules run in the order of their layers, so an earlier one begins a step."""
        if self.cancelled is not None and self.cancelled():
            self._last_layer = 1 << 30
            raise StepCancelled
        now = time.perf_counter()
        if layer <= self._last_layer:
            self.step += 1
        else:
            self._pace = now - self._begun
        self._last_layer, self._begun = layer, now

    @property
    def pace(self) -> float:
        """Seconds between the last two layers of a step."""
        return self._pace

    def phase(self, tokens: int) -> Phase:
        """For counters only."""
        decoding = tokens == 1 if self.decoding is None else self.decoding
        return Phase.DECODE if decoding else Phase.PREFILL


@dataclass(slots=True)
class _Rows:
    """Where one expert is wanted: places in [tokens x k], and the tokens; None: it is the only token."""

    places: torch.Tensor | int
    tokens: torch.Tensor | None


class _Single:
    """Outputs of the experts of one token, for all of whose places there is one: the step of a decode.

    Few calls of torch: each costs as much as a small part of an expert.
    """

    def __init__(self, wanted: dict[int, _Rows], weights: torch.Tensor) -> None:
        self._wanted = wanted
        self._weights = weights
        self._outputs: list[Any] = [None] * len(wanted)

    def inputs(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that an expert is applied to."""
        del expert
        return hidden

    def put(self, expert: int, output: torch.Tensor) -> None:
        """An expert's output for them; what it had put before is forgotten."""
        self._outputs[self._wanted[expert].places] = output

    def sum(self) -> torch.Tensor:
        """[1, H]: all outputs times their weights, added in router order."""
        outputs = torch.cat(self._outputs) * self._weights.reshape(-1, 1)
        return outputs[None].sum(dim=1)


class _Scattered:
    """Outputs of the experts of several tokens, each in a row of its own; places without an expert are zero."""

    def __init__(self, wanted: dict[int, _Rows], hidden: torch.Tensor, weights: torch.Tensor, *, whole: bool) -> None:
        make = hidden.new_empty if whole else hidden.new_zeros
        tokens, k = weights.shape
        self._wanted = wanted
        self._shape = (tokens, k, -1)
        self._scales = weights.reshape(-1, 1)
        self._rows = make(tokens * k, hidden.shape[-1], dtype=torch.promote_types(hidden.dtype, weights.dtype))

    def inputs(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `_Single`."""
        tokens = self._wanted[expert].tokens
        return hidden if tokens is None else hidden[tokens]

    def put(self, expert: int, output: torch.Tensor) -> None:
        """See `_Single`."""
        places = self._wanted[expert].places
        scaled = output * self._scales[places]
        self._rows[places] = scaled[0] if isinstance(places, int) else scaled

    def sum(self) -> torch.Tensor:
        """[tokens, H]; see `_Single`."""
        return self._rows.view(self._shape).sum(dim=1)


class BoundExperts:
    """A module's experts in a store.

    Args:
        runtime: shared by the model's modules.
        target: the module.
        reader: reads the records of its layer.
        following: the router of the next layer, if it was found.
    """

    def __init__(
        self, runtime: ExpertsRuntime, target: ExpertsModule, reader: RecordReader, following: NextRouter | None
    ) -> None:
        self._runtime = runtime
        self._module = target.module
        self._layer = target.layer
        self._experts = target.experts
        self._reader = reader
        self._following = following
        self._norm: nn.Module | None = (
            target.module.post_expert_norm if getattr(target.module, "has_post_expert_norm", False) else None
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundExperts:
        return self

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `tiered_experts`."""
        runtime = self._runtime
        with runtime.lock:
            runtime.enter(self._layer)
            return self._run(hidden_states, top_k_index, top_k_weights)

    def _run(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        runtime, source, layer = self._runtime, self._runtime.source, self._layer
        tokens = len(index)
        wanted, whole = _by_expert(index, self._experts)
        alone = tokens == 1 and len(wanted) == index.numel()
        rows = _Single(wanted, weights) if alone else _Scattered(wanted, hidden, weights, whole=whole)

        def compute(expert: int, given: ExpertWeights) -> None:
            rows.put(expert, self._apply(rows.inputs(expert, hidden), given))

        phase = runtime.phase(tokens)
        experts = list(wanted)
        runtime.experts_chosen += len(experts)
        tier = runtime.device_tier
        held = {} if tier is None else tier.find(source, layer, experts)
        fetched: dict[int, ExpertWeights] = {}
        spent = False

        def spend_free_time() -> None:
            nonlocal spent
            spent = True
            for expert, given in held.items():
                compute(expert, given)
            if runtime.hints and self._following is not None:
                self._following.hint(source, hidden, step=runtime.step, lead_seconds=runtime.pace)

        def use(expert: int, address: int) -> None:
            given = self._reader.weights_at(address) if tier is None else tier.upload(self._reader, address)
            compute(expert, given)
            if tier is not None:
                fetched[expert] = given

        missing = [expert for expert in experts if expert not in held]
        if missing:
            source.visit(layer, missing, use, step=runtime.step, phase=phase, meanwhile=spend_free_time)
        if not spent:
            spend_free_time()
        if tier is not None:
            tier.keep(layer, runtime.step, held, fetched, prefill=phase is Phase.PREFILL)
        return rows.sum().to(hidden.dtype)

    def _apply(self, x: torch.Tensor, given: ExpertWeights) -> torch.Tensor:
        """One expert's output for rows x [n, H], before the routing weight."""
        module = self._module
        y = functional.linear(x, given.up, given.up_bias)
        if module.has_gate:
            if not module.is_concatenated:
                y = _interleaved(y)
            y = module._apply_gate(y)  # noqa: SLF001  the interface's own name for a part of it
        else:
            y = module.act_fn(y)
        y = functional.linear(y, given.down, given.down_bias)
        return y if self._norm is None else self._norm(y)


def _by_expert(index: torch.Tensor, experts: int) -> tuple[dict[int, _Rows], bool]:
    """Where each expert is wanted, in router order, and whether all numbers are those of experts."""
    tokens, k = index.shape
    if tokens == 1:
        numbers = index[0].tolist()
        chosen = {number: _Rows(place, None) for place, number in enumerate(numbers) if 0 <= number < experts}
        if len(chosen) == k:
            return chosen, True
        if len({number for number in numbers if 0 <= number < experts}) == sum(0 <= n < experts for n in numbers):
            return chosen, False
    flat = index.reshape(-1)
    numbers, order = torch.sort(flat, stable=True)
    values, counts = torch.unique_consecutive(numbers, return_counts=True)
    wanted: dict[int, _Rows] = {}
    whole = True
    for number, places in zip(values.tolist(), torch.split(order, counts.tolist()), strict=True):
        if 0 <= number < experts:
            wanted[number] = _Rows(places, places // k)
        else:
            whole = False
    return wanted, whole


def _interleaved(both: torch.Tensor) -> torch.Tensor:
    """[n, 2I] with the gate's columns first to the order gate, up, gate, up, which the module's function takes."""
    gate, up = both.chunk(2, dim=-1)
    return torch.stack((gate, up), dim=-1).flatten(-2)
