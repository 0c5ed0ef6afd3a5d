"""What a token costs some sessions in waiting, for the throttle that watches them."""

from __future__ import annotations

from typing import Final

from tierd.prefetch.throttle import Throttle

__all__ = ["TokenCosts"]

_MOST_TOKENS_AT_ONCE: Final = 64


class TokenCosts:
    """Spreads the seconds that requests waited over the tokens since the last time.

    Args:
        throttle: told of each token; None: nobody wants to know.
    """

    def __init__(self, throttle: Throttle | None) -> None:
        self._throttle = throttle
        self._waited = 0.0
        self._steps: dict[int, int] = {}

    def waited(self, seconds: float) -> None:
        """A request has been answered; it waited so long for a drive."""
        self._waited += seconds

    def reached(self, session: int, step: int, *, compared: bool = True) -> None:
        """A session asks for something in that step; what was waited since the last one is what its tokens cost.

        Args:
            session: who asks.
            step: a rising number.
            compared: whether speculation could have changed these costs; else they tell the throttle nothing.
        """
        before = self._steps.get(session)
        self._steps[session] = step
        if self._throttle is None:
            return
        if before is None:
            self._throttle.disturbed()
        elif step > before:
            tokens = min(step - before, _MOST_TOKENS_AT_ONCE)
            for _ in range(tokens if compared else 0):
                self._throttle.token(self._waited / tokens)
            self._waited = 0.0

    def ended(self, session: int) -> None:
        """The session is over; harmless for an unknown one."""
        if self._steps.pop(session, None) is not None and self._throttle is not None:
            self._throttle.disturbed()
