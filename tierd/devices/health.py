"""Whether a drive is to be trusted with reads, as a pure state machine; time comes in as an argument.

    UP ──failure──→ SUSPECT ──more, or a grave one──→ QUARANTINED ──back-off──→ PROBING
    ↑←──success──────┘                                     ↑←──────failure────────┤
    ↑←──────────────────────────────success──────────────────────────────────────┘

A quarantined drive gets no reads while another drive has the record. Probes with growing back-off find out whether it
is well again.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["DriveHealth", "HealthState"]

_FAILURES_TO_QUARANTINE: Final = 3
_FIRST_BACK_OFF: Final = 1.0
_MAX_BACK_OFF: Final = 60.0


class HealthState(Enum):
    """How a drive fares."""

    UP = "up"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    PROBING = "probing"


class DriveHealth:
    """The health of one drive.

    Attributes:
        state: where it is now.
        usable: whether reads go to the drive as a matter of course.
        probe_at: moment from which a quarantined drive may be probed.
        back_off: seconds between its quarantine and that probe.
    """

    def __init__(self) -> None:
        self.state = HealthState.UP
        self.usable = True
        self.probe_at = 0.0
        self.back_off = 0.0
        self._failures = 0

    def __repr__(self) -> str:
        return f"<DriveHealth {self.state.value}, {self._failures} failures in a row>"

    def succeeded(self) -> None:
        """A read ended well. A quarantined drive is not believed before a probe says so."""
        if self._failures and self.state is not HealthState.QUARANTINED:
            self._become(HealthState.UP)
            self.back_off = 0.0
            self._failures = 0

    def failed(self, now: float, *, grave: bool) -> bool:
        """A read failed.

        Args:
            now: the moment.
            grave: it vanished, stalled or delivered wrong bytes: once is enough.

        Returns:
            True if the drive is quarantined by this; `probe_at` is set then.
        """
        if self.state is HealthState.QUARANTINED:
            return False
        self._failures += 1
        if not grave and self.state is not HealthState.PROBING and self._failures < _FAILURES_TO_QUARANTINE:
            self._become(HealthState.SUSPECT)
            return False
        self._become(HealthState.QUARANTINED)
        self.back_off = min(max(_FIRST_BACK_OFF, 2 * self.back_off), _MAX_BACK_OFF)
        self.probe_at = now + self.back_off
        return True

    def begin_probe(self, now: float) -> bool:
        """Start to probe if it is time; True if so."""
        if self.state is HealthState.QUARANTINED and now >= self.probe_at:
            self._become(HealthState.PROBING)
            return True
        return False

    def put_off(self) -> None:
        """The probe that was to begin could not; it is still due."""
        if self.state is HealthState.PROBING:
            self._become(HealthState.QUARANTINED)

    def _become(self, state: HealthState) -> None:
        self.state = state
        self.usable = state in (HealthState.UP, HealthState.SUSPECT)
