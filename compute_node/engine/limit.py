"""The machine's limit of an answer's speed: bytes that had to move, divided by bandwidth. Pure arithmetic.

Memory and drive may work at the same time, so the longer of both decides. What a step computes, how often it waits and
what it says to the daemon are no part of the limit: they are what speed is lost to.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.store.geometry import Geometry
from tierd.store.manifest import Manifest

__all__ = ["DecodeCost", "SpeedLimit", "dense_bytes_of_a_token", "expert_bytes_of_a_token"]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def dense_bytes_of_a_token(manifest: Manifest, *, tied_embeddings: bool) -> int:
    """Bytes of dense weights and scales that a step of one token reads: of the embedding table it reads a row only.

    Args:
        manifest: of the store.
        tied_embeddings: the embedding table is the LM head as well, so all of it is read.
    """
    unread = _HEAD if tied_embeddings else _EMBEDDING
    return sum(info.nbytes for info in manifest.dense if not info.name.startswith(unread))


def expert_bytes_of_a_token(geometry: Geometry) -> int:
    """Bytes of the routed experts that a step of one token computes on: weights and scales, no padding."""
    sizes = [sum(part.nbytes for part in layout.parts) for layout in geometry.layouts]
    return geometry.top_k * sum(sizes[entry.layout] for entry in geometry.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """What the steps after the first token took.

    Attributes:
        seconds: from the first token to the last.
        compute_seconds: of these, in steps and not waiting.
        wait_seconds: of these, waiting for experts.
        message_seconds: of the waits, those for experts that were in RAM: the way of a message and its answer.
        missed_experts: experts that a drive had to deliver while a step waited.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    message_seconds: float = 0.0
    missed_experts: int = 0

    def since(self, earlier: DecodeCost) -> DecodeCost:
        """What came after an earlier reading of the same counters."""
        return DecodeCost(
            seconds=self.seconds - earlier.seconds,
            compute_seconds=self.compute_seconds - earlier.compute_seconds,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            message_seconds=self.message_seconds - earlier.message_seconds,
            missed_experts=self.missed_experts - earlier.missed_experts,
        )


@dataclass(frozen=True, slots=True)
class SpeedLimit:
    """The least time that an answer's steps could take, and where the rest of their time went.

    Attributes:
        cost: of the steps.
        steps: how many, above 0.
        memory_seconds: bytes that they read / the memory's bandwidth.
        drive_seconds: bytes that they missed / the drives' bandwidth; 0 where that is not known.
    """

    cost: DecodeCost
    steps: int
    memory_seconds: float
    drive_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The least time of all steps."""
        return max(self.memory_seconds, self.drive_seconds)

    @property
    def tokens_per_second(self) -> float:
        """The speed that could not be exceeded."""
        return self.steps / self.seconds

    @property
    def share(self) -> float:
        """Speed / limit; above 1 where weights stay in the processor's cache, which is faster than memory."""
        return self.seconds / self.cost.seconds

    @property
    def lost_to(self) -> dict[str, float]:
        """Shares of the time beyond the limit, by cause; with `share` they add up to 1 where that is below 1.

        Waiting for a drive is a loss as far as the drive was not kept busy meanwhile or could have been read while
        memory was. What is left over is computing that took longer than its weights took to be read.
        """
        cost = self.cost
        lost = max(0.0, cost.seconds - self.seconds)
        drive = cost.wait_seconds - cost.message_seconds - max(0.0, self.drive_seconds - self.memory_seconds)
        between = cost.seconds - cost.compute_seconds - cost.wait_seconds
        found, left = {}, lost
        for name, part in (("messages", cost.message_seconds), ("between_tokens", between), ("drive_waits", drive)):
            found[name] = min(left, max(0.0, part))
            left -= found[name]
        return {name: part / cost.seconds for name, part in (found | {"computing": left}).items()}
