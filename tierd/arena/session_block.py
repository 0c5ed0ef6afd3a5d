"""The session block: the one piece of shared memory that a node writes, and the daemon only reads.

Per expert it counts the uses that no message told of, by phase, keeps the step of the last use, one byte of
expectation, and a mark while it is being used. Counters cannot overflow like a ring would, cost the node two stores per
use, and cost the daemon nothing until it needs a victim. The size is sealed, or a node's ftruncate would kill the
daemon by SIGBUS. The content is untrusted: the daemon copies before it looks, so that nothing changes between a check
and its use.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from array import array
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from tierd.differing import CHUNK, differing
from tierd.errors import ArenaError, LimitExceeded

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DECODE", "PREFILL", "NewUse", "SessionBlock", "SessionBlockReader", "session_memory"]

_HEADER: Final = struct.Struct("<8s I I")
_MAGIC: Final = b"TIERDSES"
_VERSION: Final = 2
_STEP_OFFSET: Final = 64
_ARRAYS_OFFSET: Final = 128
_ALIGNMENT: Final = 64
_MAX_ENTRIES: Final = 1 << 22
_MAX_STEP: Final = 1 << 62
_MAX_RISE: Final = 1 << 31
"""More uses than this between two looks is no count but nonsense."""

PREFILL: Final = 0
"""Row of `uses` for prefill."""
DECODE: Final = 1
"""Row of `uses` for decode."""
_PHASES: Final = 2


class NewUse(NamedTuple):
    """How a node used an expert without a message since the daemon looked last.

    Attributes:
        expert: flat number.
        step: of its last use.
        prefill: uses in prefill.
        decode: uses in decode. The sum of both is at least 1.
    """

    expert: int
    step: int
    prefill: int
    decode: int


class _Layout(NamedTuple):
    """Byte offsets of the arrays, each on a border of 64."""

    uses: int
    last_step: int
    expect: int
    in_use: int
    nbytes: int


def _layout(entries: int) -> _Layout:
    def after(offset: int, nbytes: int) -> int:
        return -(-(offset + nbytes) // _ALIGNMENT) * _ALIGNMENT

    last_step = after(_ARRAYS_OFFSET, _PHASES * 4 * entries)
    expect = after(last_step, 4 * entries)
    in_use = after(expect, entries)
    return _Layout(_ARRAYS_OFFSET, last_step, expect, in_use, after(in_use, entries))


def session_memory(entries: int) -> int:
    """Bytes that a session of a store with so many experts takes: its block, and the daemon's two notes of counters."""
    pages = -(-_layout(entries).nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return pages + 2 * _PHASES * 4 * entries


def _uses_in(mapping: mmap.mmap, entries: int) -> NDArray[np.uint32]:
    flat: NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, _PHASES * entries, _layout(entries).uses)
    return flat.reshape(_PHASES, entries)


class SessionBlock:
    """The node's side. Made by `attach`.

    Attributes:
        step: uint64[1], the decode step or prefill chunk that the node is in.
        uses: uint32[2, entries], how often each expert was used in prefill and in decode without having been asked for
            by a message, modulo 2**32.
        last_step: uint32[entries], low half of the step of each expert's last use.
        expect: uint8[entries], the node's estimate that it will want the expert soon; 255 is certain.
        in_use: uint8[entries], 1 while the node uses the expert without having asked. The daemon then lets another one
            leave if it can. It may fail to, or not see the mark in time: only an unchanged word makes a use certain.
    """

    def __init__(self, mapping: mmap.mmap, entries: int) -> None:
        at = _layout(entries)
        self._map = mapping
        self.step: NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, 1, _STEP_OFFSET)
        self.uses: NDArray[np.uint32] = _uses_in(mapping, entries)
        self.last_step: NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, entries, at.last_step)
        self.expect: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, entries, at.expect)
        self.in_use: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, entries, at.in_use)
        self._quick_in_use = self.in_use.data
        self._quick_uses = (self.uses[PREFILL].data, self.uses[DECODE].data)
        self._quick_last_step = self.last_step.data

    @classmethod
    def attach(cls, fd: int, entries: int) -> Self:
        """Map a block that the daemon handed over; `fd` stays the caller's.

        Raises:
            ArenaError: it is not a block for `entries` experts.
        """
        try:
            size = os.fstat(fd).st_size
            if not 1 <= entries <= _MAX_ENTRIES or size < _layout(entries).nbytes:
                raise ArenaError(f"the session block handed over has {size} bytes, too few for {entries} experts")
            mapping = mmap.mmap(fd, _layout(entries).nbytes)
        except OSError as error:
            raise ArenaError(f"the session block cannot be mapped: {error.strerror}") from error
        magic, version, told = _HEADER.unpack(mapping[: _HEADER.size])
        if (magic, version, told) != (_MAGIC, _VERSION, entries):
            raise ArenaError(
                f"the shared memory handed over is not a session block of version {_VERSION} for {entries} experts",
                hint="Run the same version of tierd on both sides.",
            )
        return cls(mapping, entries)

    def begin_step(self, step: int) -> None:
        """Say that the node is now in `step`; steps rise."""
        self.step[0] = step

    def note_use(self, expert: int, step: int, phase: int = DECODE) -> None:
        """Count one certain use of `expert` in `step`; called after the bytes were found unchanged.

        Args:
            expert: flat number.
            step: number of the step.
            phase: `PREFILL` or `DECODE`.
        """
        # The step first: whoever sees the count sees a step that belongs to it or to a later use.
        self._quick_last_step[expert] = step & 0xFFFFFFFF
        uses = self._quick_uses[phase]
        uses[expert] = (uses[expert] + 1) & 0xFFFFFFFF

    def begin_use(self, expert: int) -> None:
        """Say that `expert` is about to be used; before its word is loaded."""
        self._quick_in_use[expert] = 1

    def end_use(self, expert: int) -> None:
        """Its use is over, or did not begin."""
        self._quick_in_use[expert] = 0

    def note_asked(self, expert: int, step: int) -> None:
        """Say that `expert` was used in `step`, by a grant: the daemon counted it when it was asked for."""
        self._quick_last_step[expert] = step & 0xFFFFFFFF

    def close(self) -> None:
        """Give back the mapping; arrays that are still held keep it alive until they go."""
        for uses in self._quick_uses:
            uses.release()
        self._quick_last_step.release()
        self._quick_in_use.release()
        del self.step, self.uses, self.last_step, self.expect, self.in_use
        with suppress(BufferError):
            self._map.close()


class SessionBlockReader:
    """The daemon's side. Made by `create`, one per session.

    Attributes:
        entries: number of experts.
        fd: read-write descriptor to hand to the node; it belongs to the reader.
        refused: how often something in the block made no sense and was ignored.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, entries: int) -> None:
        at = _layout(entries)
        self.fd = fd
        self.entries = entries
        self.refused = 0
        self._map = mapping
        self._uses = _uses_in(mapping, entries)
        self._expect: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, entries, at.expect)
        whole = memoryview(mapping)
        self._step = whole[_STEP_OFFSET : _STEP_OFFSET + 8].cast("Q")
        self._last_step = whole[at.last_step : at.last_step + 4 * entries].cast("I")
        self._in_use = whole[at.in_use : at.in_use + entries]
        self._counters = slice(at.uses, at.uses + _PHASES * 4 * entries)
        self._taken = self._counted = bytes(_PHASES * 4 * entries)
        self._highest_step = 0

    @classmethod
    def create(cls, entries: int) -> Self:
        """Make an empty block for a store of `entries` experts.

        Raises:
            LimitExceeded: `entries` is outside 1 to 2**22.
            ArenaError: the kernel gives no shared memory.
        """
        if not 1 <= entries <= _MAX_ENTRIES:
            raise LimitExceeded(f"a session block for {entries} experts is outside 1 to {_MAX_ENTRIES}")
        nbytes = _layout(entries).nbytes
        try:
            fd = os.memfd_create("tierd-session", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, nbytes)
            os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, entries), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise ArenaError(f"no shared memory of {nbytes} bytes for a session: {error.strerror}") from error
        return cls(fd, mapping, entries)

    def step(self) -> int:
        """The step that the node is in. It never goes back: a lower or absurd value is ignored and counted."""
        step = self._step[0]
        if self._highest_step <= step <= _MAX_STEP:
            self._highest_step = step
        else:
            self.refused += 1
        return self._highest_step

    def uses(self) -> NDArray[np.uint32]:
        """A copy of all use counters, uint32[2, entries]."""
        return self._uses.copy()

    def count_uses(self) -> tuple[int, int]:
        """How many uses there were in prefill and in decode since the last call; absurd jumps count as none."""
        rises, self._counted = self._rises(self._counted)
        prefill = sum(rise for place, rise in rises if place < self.entries)
        return prefill, sum(rise for _, rise in rises) - prefill

    def take_uses(self) -> list[NewUse]:
        """Which experts were used since the last call, in the order of their last uses; apart from `count_uses`.

        Those of one step are in the order of their numbers. A counter that jumped by 2**31 or more, or went back,
        counts as no use.
        """
        rises, self._taken = self._rises(self._taken)
        if not rises:
            return []
        uses: dict[int, list[int]] = {}
        for place, rise in rises:
            phase, expert = divmod(place, self.entries)
            uses.setdefault(expert, [0] * _PHASES)[phase] = rise
        # Steps are told by their distance from the present one, since their low halves wrap.
        step = self.step()
        taken = []
        for expert in sorted(uses):
            age = (step - self._last_step[expert]) & 0xFFFFFFFF
            taken.append(NewUse(expert, step if age >= _MAX_RISE or age > step else step - age, *uses[expert]))
        taken.sort(key=itemgetter(1))
        return taken

    def _rises(self, before: bytes) -> tuple[list[tuple[int, int]], bytes]:
        """Places in both rows, one behind the other, where counters rose, and by how much; and the counters now."""
        now = self._map[self._counters]
        rises = []
        for at in differing(now, before):
            new, old = array("I", now[at : at + CHUNK]), array("I", before[at : at + CHUNK])
            for place, (here, then) in enumerate(zip(new, old, strict=True), at // new.itemsize):
                if here != then:
                    rise = (here - then) & 0xFFFFFFFF
                    if rise < _MAX_RISE:
                        rises.append((place, rise))
                    else:
                        self.refused += 1
        return rises, now

    def in_use(self, expert: int) -> bool:
        """Whether the node uses `expert` just now, as far as can be seen."""
        return self._in_use[expert] != 0

    def expect(self) -> NDArray[np.uint8]:
        """A copy of the node's expectations, uint8[entries]; every value is a valid one."""
        return self._expect.copy()

    def close(self) -> None:
        """Give back the mapping and the descriptor; the node keeps its own."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            for view in (self._step, self._last_step, self._in_use):
                view.release()
            del self._uses, self._expect
            with suppress(BufferError):
                self._map.close()
