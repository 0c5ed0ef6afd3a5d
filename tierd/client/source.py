"""Where a compute node takes its experts from: one interface, whatever stands behind it.

`InProcess` reads the store itself, `ArenaSource` maps a daemon's arena, others fetch bytes from afar. The node cannot
tell them apart by its tokens, only by its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tierd.requests import Phase
from tierd.store.manifest import Manifest
from tierd.store.store import DenseTensor

__all__ = [
    "DirectAccess",
    "DirectCounts",
    "ExpertSource",
    "NothingAhead",
    "Phase",
    "RowSource",
    "SourceStats",
    "StepMemory",
    "StoreView",
    "Use",
]


Use = Callable[[int, int], None]
"""`use(expert, address)`: compute with the expert's record, readable at `address` until the call returns.

It may be called again for the same expert when bytes changed under use, so it must overwrite what it wrote before,
never add to it; and it must bear any bytes, since results of a torn read are thrown away.
"""


class DirectCounts(Protocol):
    """What native code counted of its uses of `DirectAccess`; the numbers only rise, and any thread may read them."""

    @property
    def used(self) -> int:
        """Experts that it used; each was a hit."""

    @property
    def layers(self) -> int:
        """Layers that it served without `visit`."""

    @property
    def discarded(self) -> int:
        """Results that it threw away; these experts were left to `visit`."""


@dataclass(slots=True)
class SourceStats:
    """The node's own count, kept where its router's choices enter; never derived from the daemon's.

    What native code counts is added when somebody looks: a step of one text has no time to do it.

    Attributes:
        direct_tier: where the experts are that native code reads by itself.
        repeated: experts fetched again because bytes changed under use or the daemon restarted.
        wait_seconds: time in which the node had nothing to compute on because it waited for experts.
        wait_by_outcome: the same, split by the outcome of the expert that ended the wait.
        messages: requests for experts that were sent to a daemon.
        hints: messages that told of experts which would probably be wanted.
    """

    direct_tier: str = "ram"
    repeated: int = 0
    wait_seconds: float = 0.0
    wait_by_outcome: dict[str, float] = field(default_factory=lambda: {"hit": 0.0, "miss": 0.0, "joined": 0.0})
    messages: int = 0
    hints: int = 0
    _direct: list[DirectCounts] = field(default_factory=list)
    _requested: int = 0
    _visits: int = 0
    _unasked: int = 0
    _discarded: int = 0
    _tiers: dict[str, int] = field(default_factory=dict)
    _outcomes: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0, "joined": 0})

    @property
    def requested(self) -> int:
        """Unique experts asked for, summed over layers and steps."""
        return self._requested + self._used()

    @property
    def tiers(self) -> dict[str, int]:
        """Of these, how many each tier had when they were asked for (`ram`, a drive's tier, …)."""
        tiers = dict(self._tiers)
        if used := self._used():
            tiers[self.direct_tier] = tiers.get(self.direct_tier, 0) + used
        return tiers

    @property
    def outcomes(self) -> dict[str, int]:
        """Of these, how many were a hit, a miss, or joined a running read."""
        return self._outcomes | {"hit": self._outcomes["hit"] + self._used()}

    @property
    def visits(self) -> int:
        """Calls of `visit`, and layers that native code read without it."""
        return self._visits + sum([counts.layers for counts in self._direct])

    @property
    def unasked(self) -> int:
        """Hits that cost no message."""
        return self._unasked + self._used()

    @property
    def discarded(self) -> int:
        """Uses that were thrown away because the bytes may have changed under them."""
        return self._discarded + sum([counts.discarded for counts in self._direct])

    def count_direct(self, counts: DirectCounts) -> None:
        """From now on what these count belongs to it as well."""
        self._direct.append(counts)

    def ask(self, experts: int, *, visits: int = 1) -> None:
        """So many experts were asked for."""
        self._requested += experts
        self._visits += visits

    def count(self, tier: str, outcome: str, experts: int) -> None:
        """So many experts were in this tier, and their requests ended in this outcome."""
        self._outcomes[outcome] += experts
        self._tiers[tier] = self._tiers.get(tier, 0) + experts

    def count_unasked(self, hits: int, discarded: int) -> None:
        """So many experts were used where they lie, without a message; so many results of others were thrown away."""
        self._unasked += hits
        self._discarded += discarded
        if hits:
            self.count(self.direct_tier, "hit", hits)

    def snapshot(self) -> SourceStats:
        """A copy that does not change any more."""
        return replace(
            self,
            wait_by_outcome=dict(self.wait_by_outcome),
            _direct=[],
            _requested=self.requested,
            _visits=self.visits,
            _unasked=self.unasked,
            _discarded=self.discarded,
            _tiers=self.tiers,
            _outcomes=self.outcomes,
        )

    def _used(self) -> int:
        return sum([counts.used for counts in self._direct])


@dataclass(frozen=True, slots=True)
class DirectAccess:
    """Addresses by which native code reads resident experts itself, without a call of `ExpertSource.visit`.

    Nothing is locked and nothing is granted: the owner of the memory may replace an expert at any moment, so a result
    counts only if the expert's word is the same before and after. For the expert with the flat number i
    (`Geometry.layer_start(layer)` + its number in the layer):

    0. Store 1 to the byte at `in_use + i`: the daemon lets another expert leave then, if there is one.
    1. `w = load(table + 8 i)`, an aligned 8-byte load that acquires. 0: not resident, leave it to `visit`.
    2. Compute on the record at `payload + ((w & 0xFFFFFF) - 1) * slot_bytes`, into rows that nothing else reads yet.
       Bytes may change meanwhile, so any bit pattern must be borne: no trap, no access by an index from them.
    3. After the last load of the record, on every thread that loaded from it: a load fence, then load the word again.
       Anything else than `w`, on any thread: throw the rows away and leave the expert to `visit`. (x86 keeps loads in
       order, so there the fence binds the compiler alone. Arm needs a real one; Arm was not run.)
    4. When all threads agree, and only then, one of them stores the low half of the step at `last_step + 4 i` and
       after it adds 1 to the uint32 at `uses + 4 i`, wrapping. `uses` is `prefill_uses` or `decode_uses`.
    5. Certain or not, store 0 to the byte at `in_use + i`.
    6. The same uses are counted in the node's own statistics: `SourceStats.count_direct` is told once where they stand.

    Before the first load of a step, the step's number is stored at `step`. An expert left to `visit` must not be
    counted here: `visit` counts what it delivers.

    Attributes:
        epoch: rises with every new mapping. Addresses and words of an older epoch are dead.
        table: address of uint64[entries], one word per flat number; only read.
        payload: address of slot 0; only read.
        slot_bytes: bytes of a slot.
        entries: number of experts.
        step: address of one uint64.
        in_use: address of uint8[entries].
        last_step: address of uint32[entries].
        prefill_uses: address of uint32[entries].
        decode_uses: address of uint32[entries].
    """

    epoch: int
    table: int
    payload: int
    slot_bytes: int
    entries: int
    step: int
    in_use: int
    last_step: int
    prefill_uses: int
    decode_uses: int


@dataclass(frozen=True, slots=True, eq=False)
class StepMemory:
    """What a node tells the daemon of its step, and what can be seen of it.

    Attributes:
        expect: uint8[entries], by flat number, in 255ths: what the node expects to use soon. It writes it, at any
            moment; the daemon's policy looks at it when the node asks for experts.
        last_step: uint32[entries], the low half of the last step that used each expert. Only read here.
    """

    expect: NDArray[np.uint8]
    last_step: NDArray[np.uint32]


@runtime_checkable
class StoreView(Protocol):
    """What a node reads once at start: geometry, text files, dense weights. All of it verified."""

    @property
    def manifest(self) -> Manifest:
        """Geometry, formats, and what else the store says of itself."""

    @property
    def fingerprint(self) -> str:
        """64 hex digits over everything that decides a token."""

    def read_file(self, name: str) -> bytes:
        """A text file of the store (config.json, tokenizer.json, …); UsageError if the manifest does not list it."""

    def read_dense(self, name: str) -> DenseTensor:
        """A dense tensor under the checkpoint's own name; ChecksumMismatch if its bytes are not the converted ones."""


@runtime_checkable
class ExpertSource(Protocol):
    """Brings experts to the node's engine thread. Synchronous; one caller at a time."""

    stats: SourceStats

    @property
    def store(self) -> StoreView:
        """The store that the experts belong to."""

    @property
    def direct(self) -> DirectAccess | None:
        """How native code may read resident experts itself; None where only `visit` brings them.

        Asked once per step, and again after every `visit`, which may end a mapping and begin another.
        """

    @property
    def step_memory(self) -> StepMemory | None:
        """Where the node says what it expects; None where nobody listens. Asked once per step, and not kept."""

    def absent(self, layer: int) -> NDArray[np.bool_] | None:
        """Which experts of a layer are not in RAM now: bool [experts]; None where nobody listens to hints."""

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """Say which experts this node will probably want; it replaces the last hint for the layer. Never waits.

        A hint changes how fast an expert comes and nothing else. Nothing is sent where all of them are in RAM.

        Args:
            layer: model layer number.
            experts: numbers in the layer.
            probabilities: of each, 0 to 1.
            step: the step that will want them, as in `visit`.
            lead_seconds: until the layer is expected to start; 0 is unknown.
        """

    def say_tokens(self, tokens: Sequence[int], *, step: int) -> None:
        """Say which tokens a step is about to compute on, to a daemon that guesses from them. Never waits.

        Args:
            tokens: of the step's rows.
            step: its number, as in `visit`.
        """

    def visit(
        self,
        layer: int,
        experts: Sequence[int],
        use: Use,
        *,
        step: int,
        phase: Phase,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Call `use` for every expert of `experts`, in order of arrival, and return when all uses are certain.

        Args:
            layer: model layer number.
            experts: distinct expert numbers, in the order in which the router ranked them; more than fit the arena
                are served in waves, each expert read once.
            use: see `Use`.
            step: decode step or prefill chunk, rising.
            phase: prefill or decode, for the counters.
            meanwhile: called at most once, when the missing experts have been asked for and the others were used: the
                time until the first of them comes is free.

        Raises:
            DataLoss: no good copy of an expert exists.
            DeadlineExceeded: an expert did not come in time.
            DaemonUnavailable: the daemon went away and did not come back within the bound.
            SessionRefused: a daemon came back that serves another store.
        """

    def close(self) -> None:
        """End the session and give back mappings, sockets and threads."""


class NothingAhead:
    """The part of an `ExpertSource` that reads nothing before it is wanted: hints and tokens tell it nothing."""

    def absent(self, layer: int) -> None:
        """None: nobody listens to hints."""

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """See `ExpertSource.hint`."""

    def say_tokens(self, tokens: Sequence[int], *, step: int) -> None:
        """See `ExpertSource.say_tokens`."""


@runtime_checkable
class RowSource(ExpertSource, Protocol):
    """A source that has experts computed elsewhere, instead of bringing them."""

    def compute(
        self,
        layer: int,
        experts: NDArray[np.int32],
        inputs: NDArray[np.float32],
        outputs: NDArray[np.float32],
        *,
        step: int,
        phase: Phase,
    ) -> Sequence[int]:
        """Have a layer's experts applied to rows; bit for bit what the node itself would have computed.

        Args:
            layer: model layer number.
            experts: int32 [rows, k], the experts of each row in router order; -1 where nothing is wanted.
            inputs: float32 [rows, H], what they are applied to.
            outputs: float32 [rows, k, H]; the row of each wanted pair is overwritten.
            step: decode step or prefill chunk, rising.
            phase: prefill or decode, for the counters.

        Returns:
            Experts that nobody computed with, in the order given: the node brings them by `visit`, and computes.

        Raises:
            LimitExceeded: the store has no such layer or expert.
        """
