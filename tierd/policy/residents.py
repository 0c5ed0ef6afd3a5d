"""What all policies share: who is resident, errors of the caller, and inputs that a policy may leave unread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["ResidentPolicy", "first_evictable"]

T = TypeVar("T")


class ResidentPolicy(ABC, Generic[T]):
    """Base of the policies: keeps a mark of type `T` for each resident expert and checks every call.

    A policy says what happens when an expert enters (`_enter`, which gives its mark), is used (`_use`) and leaves
    (`_leave`, which is given the mark). `visit`, `expected` and `ended` do nothing here.
    """

    name: str

    def __init__(self) -> None:
        self._resident: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._resident)

    def __repr__(self) -> str:
        return f"{self.name}: {len(self)} experts"

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """This policy does not ask which session, step or layer uses an expert."""

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """This policy does not ask what a session expects."""

    def ended(self, session: int) -> None:
        """This policy keeps nothing of a session."""

    def inserted(self, expert: int) -> None:
        """`expert` became resident; UsageError if it is resident already."""
        if expert in self._resident:
            raise UsageError(f"expert {expert} is resident already and cannot be inserted again")
        self._resident[expert] = self._enter(expert)

    def used(self, expert: int) -> None:
        """A router chose `expert`; UsageError if it is not resident."""
        if expert not in self._resident:
            raise self._not_used(expert)
        self._use(expert)

    def used_many(self, experts: Iterable[int]) -> None:
        """Routers chose these, one after the other; UsageError if one of them is not resident."""
        for expert in experts:
            self.used(expert)

    def removed(self, expert: int) -> None:
        """`expert` left; UsageError if it is not resident."""
        if expert not in self._resident:
            raise UsageError(f"expert {expert} is not resident and cannot be removed")
        self._leave(expert, self._resident.pop(expert))

    def worth(self, expert: int) -> float | None:
        """This policy has an order, and no measure that could be compared with a probability."""
        del expert
        return None

    @staticmethod
    def _not_used(expert: int) -> UsageError:
        return UsageError(f"expert {expert} is not resident and cannot be used")

    @abstractmethod
    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert that would leave first among those that `evictable` accepts; it stays until `removed`."""

    @abstractmethod
    def _enter(self, expert: int) -> T: ...

    @abstractmethod
    def _use(self, expert: int) -> None: ...

    @abstractmethod
    def _leave(self, expert: int, mark: T) -> None: ...


def first_evictable(queue: Iterable[int], evictable: Callable[[int], bool]) -> int | None:
    """The first expert of a queue that may leave; one step per expert that may not, as many as are in use."""
    return next((expert for expert in queue if evictable(expert)), None)
