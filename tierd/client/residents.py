"""Resident experts of an attached arena, used without asking: load the word, use, compare the word, then count."""

from __future__ import annotations

from collections.abc import Iterable

from tierd.arena.attach import Attachment
from tierd.arena.session_block import DECODE, PREFILL
from tierd.arena.table import unpack
from tierd.client.source import DirectAccess, Phase, Use

__all__ = ["Residents"]

_ROWS = {Phase.PREFILL: PREFILL, Phase.DECODE: DECODE}


class Residents:
    """The unasked side of one attachment, and the only writer of its session block besides native code.

    Loads and stores here are plain ones, by CPython: on x86 a plain load acquires and a plain store releases, and the
    interpreter's calls keep the compiler's order. Arm would need fences here; Arm was not run.

    Args:
        memory: the attachment.
        unasked: whether residents may be used without asking; else `find` finds none and `direct` is None.
        epoch: number of this attachment.

    Attributes:
        direct: the same for native code.
    """

    def __init__(self, memory: Attachment, *, unasked: bool, epoch: int) -> None:
        self._memory = memory
        self._unasked = unasked
        block = memory.block
        self.direct = (
            DirectAccess(
                epoch=epoch,
                table=memory.table.address,
                payload=memory.payload.address,
                slot_bytes=memory.slot_bytes,
                entries=memory.entries,
                step=block.step.ctypes.data,
                in_use=block.in_use.ctypes.data,
                last_step=block.last_step.ctypes.data,
                prefill_uses=block.uses[PREFILL].ctypes.data,
                decode_uses=block.uses[DECODE].ctypes.data,
            )
            if unasked
            else None
        )

    def begin_step(self, step: int) -> None:
        """Say which step the node is in."""
        self._memory.block.begin_step(step)

    def find(self, first: int, experts: Iterable[int]) -> dict[int, int]:
        """The words of those experts of a layer that are resident now, in the order given; they are marked as in use.

        Args:
            first: flat number of the layer's expert 0.
            experts: numbers in the layer.
        """
        if not self._unasked:
            return {}
        load, block = self._memory.table.load, self._memory.block
        found = {}
        for expert in experts:
            block.begin_use(first + expert)
            if word := load(first + expert):
                found[expert] = word
            else:
                block.end_use(first + expert)
        return found

    def use(self, first: int, found: dict[int, int], use: Use, *, step: int, phase: Phase) -> list[int]:
        """Use what `find` found, and count what is certain; returns the experts whose use is not."""
        memory, block, row = self._memory, self._memory.block, _ROWS[phase]
        torn = []
        try:
            for expert, word in found.items():
                use(expert, memory.slot_address(unpack(word)[1]))
                if memory.table.unchanged(first + expert, word):
                    block.note_use(first + expert, step, row)
                else:
                    torn.append(expert)
        finally:
            for expert in found:
                block.end_use(first + expert)
        return torn

    def settle(self, first: int, used: dict[int, int], *, step: int) -> list[int]:
        """After the use of granted experts, by their words; returns those whose use is not certain."""
        memory = self._memory
        torn = []
        for expert, word in used.items():
            if memory.table.unchanged(first + expert, word):
                memory.block.note_asked(first + expert, step)
            else:
                torn.append(expert)
        return torn
