"""A wish to stop that native code sees as well: a step ends at its next layer, not at its end."""

from __future__ import annotations

import numpy as np

from compute_node.kernels.op import address_of

__all__ = ["CancelWord"]


class CancelWord:
    """Says whether a step shall be given up; goes wherever a `Cancelled` goes. Any thread may set it at any moment.

    Attributes:
        address: of an int64 that native code reads: not 0 is the wish.
    """

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        word = np.zeros(1, np.int64)
        self.address = address_of(word)
        self._word = word.data  # keeps the array, and is read with a fraction of its code

    def __call__(self) -> bool:
        """Whether it is set."""
        return self._word[0] != 0

    def cancel(self) -> None:
        """Give up what runs."""
        self._word[0] = 1

    def clear(self) -> None:
        """Forget the wish."""
        self._word[0] = 0
