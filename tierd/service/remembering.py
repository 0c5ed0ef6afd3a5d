"""What a daemon takes from one run to the next: usage history, the warm start that it gives, and pins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from tierd.broker.broker import Broker
from tierd.errors import LimitExceeded, UsageError
from tierd.policy.pins import PinnedPolicy
from tierd.policy.policy import EvictionPolicy
from tierd.policy.usage import Recalls, RecordedPolicy, UsageCounts
from tierd.service.history import HistoryFile, history_path
from tierd.settings import HistoryMode, ServeSettings
from tierd.small_files import read_at_most
from tierd.store.store import ExpertStore

__all__ = ["NO_PINS", "Remembering", "read_pins"]

NO_PINS: Final = "none"

_SAVE_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_TELL_SECONDS = 2.0
_MAX_PIN_BYTES = 64 << 20

_log = structlog.get_logger()


class Remembering:
    """Stands between the broker and its policy: counts uses, keeps pins, and knows what was hot before.

    There are no automatic pins: a policy that begins with earlier rates keeps what is hot by itself. On replay of the
    held-out trace, pins of the hottest experts for a tenth to half of the arena cost decayed frequency up to 12 % more
    misses and saved it at most 0.01 %.

    Args:
        store: being served.
        settings: history, state directory, pins.
        policy: decides over all that is not pinned.

    Attributes:
        policy: for the broker.
        file: the history; None if it is off.
        wanted: experts that the warm start wants to read.

    Raises:
        UsageError: the file of pins is wrong.
    """

    def __init__(self, store: ExpertStore, settings: ServeSettings, policy: EvictionPolicy) -> None:
        experts = store.geometry.experts_total
        self.file: HistoryFile | None = None
        self.wanted = 0
        self._store = store
        self._writes = settings.history is HistoryMode.ON
        self._inner = policy
        self._pins = PinnedPolicy(policy)
        self._counts = UsageCounts(experts)
        self._saved_changes = 0
        self._warming: list[int] = []
        self._broker: Broker | None = None
        if settings.pin != NO_PINS:
            self._pins.pin(read_pins(store, Path(settings.pin)))
        self.policy: EvictionPolicy = self._pins
        if settings.history is not HistoryMode.OFF:
            path = history_path(store.path, store.fingerprint, settings.state_dir)
            self.file = HistoryFile(path, store.fingerprint, experts)
            self.policy = RecordedPolicy(self._pins, self._counts)
        elif settings.state_dir is not None:
            _log.warning("--state-dir has no effect with --history off", directory=str(settings.state_dir))

    @property
    def pinned(self) -> int:
        """How many experts are pinned."""
        return len(self._pins.pinned)

    def rates(self) -> NDArray[np.float64]:
        """Uses of each expert per step, as far as they are remembered: float64[experts]."""
        return self._counts.rates()

    async def load(self) -> None:
        """Learn what earlier runs used. Call it before anything is resident."""
        values = await self.file.load() if self.file is not None else None
        if values is not None:
            self._counts.recall(values)
            if isinstance(self._inner, Recalls):
                self._inner.recall(self._counts.rates())

    def serve(self, broker: Broker) -> None:
        """The broker that tells of uses, and that reads."""
        self._broker = broker

    def warm(self, slots: int, depth: int) -> None:
        """Let the broker read pins and what was hot, as far as it fits, while nobody waits.

        Args:
            slots: of the arena.
            depth: reads at a time.
        """
        pins = sorted(self._pins.pinned)
        hot = [flat for flat in self._counts.hottest(slots) if flat not in self._pins.pinned]
        chosen = (pins + hot)[:slots]
        self.wanted = len(chosen)
        self._warming = chosen
        if len(pins) > slots // 2:
            _log.warning("pins take more than half of the arena", pinned=len(pins), slots=slots)
        if chosen and self._broker is not None:
            _log.info("warm start", experts=len(chosen), pinned=len(pins), history=str(self.file and self.file.path))
            self._broker.warm(chosen, depth)

    async def watch(self) -> None:
        """Tell how the warm start goes, and save what changed once a minute."""
        loop = asyncio.get_running_loop()
        begun = told = loop.time()
        while self._broker is not None and (left := len(self._broker.background)):
            await asyncio.sleep(_LOOK_SECONDS)
            if loop.time() > told + _TELL_SECONDS:
                told = loop.time()
                _log.info("warming", experts=self.wanted - left, of=self.wanted, seconds=round(told - begun, 1))
        self._rank_warmed()
        if self.wanted:
            _log.info("warm start ended", seconds=round(loop.time() - begun, 1))
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await self.save()

    def _rank_warmed(self) -> None:
        """Let a policy that recalls nothing know which of the experts that came first, the hottest, to keep longest."""
        if self._broker is not None and not isinstance(self._inner, Recalls):
            resident = set(self._broker.resident())
            for flat in reversed(self._warming):
                if flat in resident:
                    self._pins.used(flat)
        self._warming = []

    async def save(self) -> None:
        """Write the history if anything was used since it was written last."""
        if self._broker is not None:
            self._broker.tell_uses()
        if self.file is None or not self._writes or self._counts.changes == self._saved_changes:
            return
        changes = self._counts.changes
        if await self.file.save(self._counts.values()):
            self._saved_changes = changes

    def pin(self, layer: int, experts: Sequence[int], *, pinned: bool) -> int:
        """Pin or unpin experts of a layer, all of it if none are named; returns how many are pinned now.

        Raises:
            LimitExceeded: there is no such layer or expert.
        """
        geometry = self._store.geometry
        flats = [geometry.flat(layer, expert) for expert in experts or range(geometry.experts_in(layer))]
        if not pinned:
            self._pins.unpin(flats)
        else:
            self._pins.pin(flats)
            if self._broker is not None and not len(self._broker.background):
                self._broker.warm(flats, 1)
        return self.pinned


def read_pins(store: ExpertStore, path: Path) -> list[int]:
    """Flat numbers from a file of lines `LAYER EXPERT…`; `#` begins a remark.

    Raises:
        UsageError: it cannot be read, or a line is none; the message names it.
    """
    try:
        lines = read_at_most(path, _MAX_PIN_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--pin: {path} cannot be read: {error}", hint="Give a text file, or none.") from None
    flats: dict[int, None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            layer, *experts = (int(word) for word in words)
            if not experts:
                raise ValueError  # noqa: TRY301, the same complaint
            flats.update(dict.fromkeys(store.geometry.flat(layer, expert) for expert in experts))
        except LimitExceeded as error:
            raise UsageError(f"--pin: {path}, line {number}: {error.message}", hint=error.hint) from None
        except ValueError:
            raise UsageError(
                f"--pin: {path}, line {number} is not a layer and its experts: {line[:80]!r}",
                hint="Write a layer's number and expert numbers, such as: 3 17 21 40",
            ) from None
    return list(flats)
