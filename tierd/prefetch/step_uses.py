"""Which experts were used in this step or the last of some session: no prefetch takes their slots."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["StepUses"]


@dataclass(slots=True)
class _Steps:
    newest: int
    before: int | None = None
    this: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)


class StepUses:
    """The uses of two steps per session: the newest one that it told of, and the one before that."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Steps] = {}

    def used(self, session: int, step: int, experts: Collection[int]) -> None:
        """The session used the experts in that step; uses may be told out of order."""
        steps = self._sessions.get(session)
        if steps is None:
            steps = self._sessions[session] = _Steps(step)
        if step > steps.newest:
            steps.before, steps.last = steps.newest, steps.this
            steps.newest, steps.this = step, set()
        if step == steps.newest:
            steps.this.update(experts)
        elif steps.before is None or step > steps.before:
            steps.before, steps.last = step, set(experts)
        elif step == steps.before:
            steps.last.update(experts)

    def recent(self, expert: int) -> bool:
        """Whether some session used the expert in this step or the last."""
        for steps in self._sessions.values():  # noqa: SIM110 - asked for each expert that could leave
            if expert in steps.this or expert in steps.last:
                return True
        return False

    def ended(self, session: int) -> None:
        """The session is over; harmless for an unknown one."""
        self._sessions.pop(session, None)
