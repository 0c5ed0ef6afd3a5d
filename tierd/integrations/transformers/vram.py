"""The device tier: experts kept on the device that computes, dequantised and ready.

It lies in front of the source: what it holds is asked of nobody, is counted here, as the tier `vram`, and ages in the
daemon's RAM. Records go through a few buffers; on CUDA these are page-locked, and are copied to the device on a stream
of their own while it computes. On another device the same way is gone without a stream.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch

from tierd.client.source import ExpertSource
from tierd.errors import UsageError
from tierd.integrations.transformers.records import ExpertWeights, RecordReader
from tierd.policy.policy import EvictionPolicy
from tierd.sizes import format_bytes
from tierd.store.geometry import Geometry

__all__ = ["VRAM", "DeviceTier"]

VRAM: Final = "vram"
"""Name of the tier in all counts."""

_STAGES: Final = 4
"""Page-locked buffers, so that one can be filled while others are copied to the device."""


class DeviceTier:
    """Experts on a device, within a budget; the policy says which one leaves.

    Args:
        device: that computes.
        budget: bytes of weights at most; 0 keeps nothing and only brings records to the device.
        policy: who leaves; a fresh one.
        geometry: of the store.
        expert_bytes: of one expert as it is kept, the largest.

    Attributes:
        nbytes: bytes of the experts that are held now.
        uploads: records that were brought to the device.

    Raises:
        UsageError: a budget that holds no expert.
    """

    def __init__(
        self, device: torch.device, *, budget: int, policy: EvictionPolicy, geometry: Geometry, expert_bytes: int
    ) -> None:
        if 0 < budget < expert_bytes:
            raise UsageError(
                f"--vram {format_bytes(budget)} holds no expert: one takes {format_bytes(expert_bytes)} there",
                hint=f"Give at least {expert_bytes} bytes, or leave it out.",
            )
        self.device = device
        self.budget = budget
        self.nbytes = 0
        self.uploads = 0
        self._policy = policy
        self._geometry = geometry
        self._held: dict[int, ExpertWeights] = {}
        self._stages: list[tuple[torch.Tensor, Any]] = []
        self._next_stage = 0
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __repr__(self) -> str:
        return (
            f"<DeviceTier {self.device}, {len(self._held)} experts, {format_bytes(self.nbytes)} of "
            f"{format_bytes(self.budget)}, {self._policy.name}>"
        )

    def __len__(self) -> int:
        return len(self._held)

    def find(self, source: ExpertSource, layer: int, experts: list[int]) -> dict[int, ExpertWeights]:
        """Those of a layer's experts that are held, counted in the source's statistics as hits of this tier."""
        start = self._geometry.layer_start(layer)
        held = {expert: self._held[start + expert] for expert in experts if start + expert in self._held}
        stats = source.stats
        stats.ask(len(held), visits=int(len(held) == len(experts)))
        stats.count(VRAM, "hit", len(held))
        return held

    def upload(self, reader: RecordReader, address: int) -> ExpertWeights:
        """The weights of the record at an address, in memory of this device's own.

        The record has been read when this returns; the copy to a CUDA device may still be on its way, and what is
        computed on the current stream waits for it.
        """
        self.uploads += 1
        return reader.weights(self._to_device(reader.at(address)))

    def keep(
        self,
        layer: int,
        step: int,
        held: dict[int, ExpertWeights],
        fetched: dict[int, ExpertWeights],
        *,
        prefill: bool,
    ) -> None:
        """Take in what was brought for a layer, and let others go; all uses of it are certain now.

        Args:
            layer: whose experts they are.
            step: of the model.
            held: what `find` found.
            fetched: what `upload` made since.
            prefill: the step was no decode step.
        """
        if self.budget == 0:
            return
        policy, start = self._policy, self._geometry.layer_start(layer)
        policy.visit(0, step, layer, prefill=prefill)
        now = {start + expert for expert in (*held, *fetched)}
        for expert in held:
            policy.used(start + expert)
        for expert, weights in fetched.items():
            if self._make_room(weights.nbytes, now):
                flat = start + expert
                self._held[flat] = weights
                self.nbytes += weights.nbytes
                policy.inserted(flat)
                policy.used(flat)

    def clear(self) -> None:
        """Let all experts go."""
        for flat in list(self._held):
            self._drop(flat)

    def _make_room(self, nbytes: int, now: set[int]) -> bool:
        """Whether so many bytes are free, after others left; none of `now` does."""
        while self.nbytes + nbytes > self.budget:
            victim = self._policy.victim(lambda flat: flat not in now)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _drop(self, flat: int) -> None:
        self.nbytes -= self._held.pop(flat).nbytes
        self._policy.removed(flat)

    def _to_device(self, record: torch.Tensor) -> torch.Tensor:
        """uint8 [record_bytes] in memory of the device's own; the source's bytes have been read when this returns."""
        if not self._stages:
            size, streams = self._geometry.slot_bytes, self._stream is not None
            self._stages = [
                (
                    torch.empty(size, dtype=torch.uint8, pin_memory=streams),
                    torch.cuda.Event() if streams else None,
                )
                for _ in range(_STAGES)
            ]
        buffer, done = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % _STAGES
        if done is not None:
            done.synchronize()  # the copy out of this buffer, four records ago
        staged = buffer[: len(record)]
        staged.copy_(record)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            there = staged.to(self.device, non_blocking=True, copy=True)
        if done is not None:
            done.record(self._stream)
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(done)
            there.record_stream(computing)
        return there
