"""What people are told when kernels are compiled, which takes about a minute and happens once for each version."""

from __future__ import annotations

import sys

from numba.core import event

__all__ = ["tell_once"]


class _Teller(event.Listener):
    """Says so at the first function that no cache has."""

    def __init__(self) -> None:
        self._told = False

    def on_start(self, _event: event.Event) -> None:
        """A function begins to be compiled."""
        if not self._told:
            self._told = True
            print("compute-node: compiling kernels for this processor, once; about a minute …", file=sys.stderr)

    def on_end(self, _event: event.Event) -> None:
        """It has been."""


def tell_once() -> None:
    """From now on, in this process."""
    event.register("numba:compile", _Teller())
