"""Which pages of the KV cache are free, which are shared, and which keep a prefix that may be taken over.

A page that is full of tokens can be named by a digest of these tokens and all before them. A sequence that begins with
the same tokens takes the page over instead of computing it again, whether the one that filled it still runs or not.
Pages of ended sequences keep their names until room is needed; then the one that was left the longest ago goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from compute_node.kernels.pages import PAGE

__all__ = ["Name", "PagePool", "prefix_names"]

Name = bytes


def prefix_names(tokens: Sequence[int], known: Sequence[Name] = ()) -> Iterator[Name]:
    """Names of the whole pages of a text, in order: each a digest of 128 bits over all tokens up to its end.

    Args:
        tokens: the text.
        known: names of its first pages, which are not given again.
    """
    name = known[-1] if known else b""
    for start in range(len(known) * PAGE, len(tokens) - PAGE + 1, PAGE):
        page = np.array(tokens[start : start + PAGE], np.int64)
        name = hashlib.blake2b(name + page.tobytes(), digest_size=16).digest()
        yield name


class PagePool:
    """Pages by reference count. Pure bookkeeping: it holds no rows.

    Args:
        pages: how many there are, numbered from 0.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._names: list[Name | None] = [None] * pages
        self._named: dict[Name, int] = {}
        self._left: OrderedDict[int, None] = OrderedDict()  # named pages that nobody holds, the longest left first

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._left)

    @property
    def kept(self) -> int:
        """Of these, pages that keep a prefix."""
        return len(self._left)

    def take(self, count: int) -> list[int] | None:
        """So many pages with nothing in them, each held once; None, and no change, if there are not so many."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._left.popitem(last=False)
                self.unname(page)
            self._references[page] = 1
            taken.append(page)
        return taken

    def find(self, names: Iterator[Name]) -> dict[Name, int]:
        """Names and pages of the longest prefix that is known, in order; each page is held once more."""
        found: dict[Name, int] = {}
        for name in names:
            page = self._named.get(name)
            if page is None:
                break
            if self._references[page] == 0:
                del self._left[page]
            self._references[page] += 1
            found[name] = page
        return found

    def shared(self, page: int) -> bool:
        """Whether more than one sequence holds the page."""
        return self._references[page] > 1

    def name(self, page: int, name: Name) -> None:
        """The page holds this prefix's last tokens, and will not be written any more; a second copy gets no name."""
        if name not in self._named and self._names[page] is None:
            self._named[name], self._names[page] = page, name

    def unname(self, page: int) -> None:
        """The page is going to be written: nobody may take it over."""
        name = self._names[page]
        if name is not None:
            del self._named[name]
            self._names[page] = None

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages of a sequence, given in its order; later ones lose their prefix before earlier ones do."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._names[page] is None:
                    self._free.append(page)
                else:
                    self._left[page] = None
