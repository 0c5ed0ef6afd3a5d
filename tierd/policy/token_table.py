"""Which experts does a token choose? Counted while the model runs, in bounded memory.

In early layers routing follows the token more than its context, so a count by token is a good guess before the first
layer has run. The same count one step later says what the layers already passed will want next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["ChoiceTable", "TokenTable"]

_PLACES: Final = 16
"""Experts remembered per token and layer; on the training trace, 32 would win nothing."""

_MOST_SEEN: Final = 1 << 14
"""At so many countings of a token all its counts are halved: they fit 16 bits, and old habits fade."""

_DEFAULT_BYTES: Final = 64 << 20


class ChoiceTable:
    """Counts of the experts that go with a token, the most frequent ones of each layer.

    A place is 4 bytes of expert and 2 of count. An expert without a place takes that of the smallest count of its
    layer, and goes on counting from there (Space-Saving: Metwally, Agrawal and El Abbadi, ICDT 2005). When all rows
    are taken, the token that was counted the longest ago gives up its own.

    Args:
        layers: layers with routed experts.
        max_tokens: rows, at least one.
        places: experts remembered per token and layer.
    """

    def __init__(self, layers: int, max_tokens: int, *, places: int = _PLACES) -> None:
        if min(layers, max_tokens, places) < 1:
            raise UsageError("a token table has at least one layer, one token and one place")
        self.max_tokens = max_tokens
        self._rows: OrderedDict[int, int] = OrderedDict()  # token -> row, the longest not counted first
        self._experts = np.full((0, layers, places), -1, np.int32)
        self._counts = np.zeros((0, layers, places), np.uint16)
        self._seen = np.zeros(0, np.uint32)
        self._layers, self._places = layers, places

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self._experts.nbytes + self._counts.nbytes + self._seen.nbytes

    def count(self, token: int, experts: NDArray[np.int32]) -> None:
        """The token went with these experts once more: int32 [layers, top_k] flat numbers, distinct in a layer."""
        row = self._row(token)
        ids, counts = self._experts[row], self._counts[row]
        same = ids[:, :, None] == experts[:, None, :]
        counts += same.any(2)
        for layer, rank in zip(*np.nonzero(~same.any(1)), strict=True):
            place = int(counts[layer].argmin())
            ids[layer, place] = experts[layer, rank]
            counts[layer, place] += 1
        self._seen[row] += 1
        if self._seen[row] >= _MOST_SEEN:
            counts >>= 1
            self._seen[row] >>= 1

    def probabilities(self, token: int) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Flat numbers (-1 for an empty place) and probabilities, both [layers, places]; None for an unknown token.

        One counting more is assumed, which chose nobody: what was seen once is not yet certain.
        """
        row = self._rows.get(token)
        if row is None:
            return None
        return self._experts[row], np.minimum(self._counts[row] / np.float32(self._seen[row] + 1), np.float32(1))

    def at(self, token: int, layer: int) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """The same of one layer, by its place: both [places]."""
        row = self._rows.get(token)
        if row is None:
            return None
        shares = self._counts[row, layer] / np.float32(self._seen[row] + 1)
        return self._experts[row, layer], np.minimum(shares, np.float32(1), dtype=np.float32)

    def rows_of(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Where the tokens' counts lie in `layer`, -1 for unknown ones: int64 [tokens]."""
        rows = self._rows
        return np.array([rows.get(token, -1) for token in tokens], np.int64)

    def layer(self, layer: int) -> tuple[NDArray[np.int32], NDArray[np.uint16], NDArray[np.uint32]]:
        """A layer as it is counted, by its place: flat numbers and counts [rows, places], countings of tokens [rows].

        They are views, for reading at once: the next counting changes them.
        """
        return self._experts[:, layer], self._counts[:, layer], self._seen

    def most_seen(self, count: int) -> NDArray[np.int64]:
        """Tokens that were counted most often, at most so many, rising: int64."""
        tokens = np.fromiter(self._rows, np.int64, len(self._rows))
        if len(tokens) > count:
            seen = self._seen[np.fromiter(self._rows.values(), np.int64, len(tokens))]
            tokens = tokens[np.argsort(seen, kind="stable")[len(tokens) - count :]]
        return np.sort(tokens)

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The table's content, for a file: `tokens`, `seen`, `experts`, `counts`, the longest not counted first."""
        rows = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        tokens = np.fromiter(self._rows, np.int64, len(self._rows))
        return {
            "tokens": tokens,
            "seen": self._seen[rows],
            "experts": self._experts[rows],
            "counts": self._counts[rows],
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], *, experts: int) -> None:
        """Takes the content of `as_arrays` in place of its own, the newest tokens if there are too many.

        Args:
            arrays: as a file gave them.
            experts: how many the store has; all flat numbers must lie below.

        Raises:
            UsageError: the arrays are not such a content. The table is then as it was.
        """
        known = arrays.get("tokens")
        shape = (-1 if known is None or not known.shape else len(known), self._layers, self._places)
        kinds = {"tokens": (np.int64, 1), "seen": (np.uint32, 1), "experts": (np.int32, 3), "counts": (np.uint16, 3)}
        for name, (dtype, axes) in kinds.items():
            array = arrays.get(name)
            if array is None or array.dtype != dtype or array.shape != shape[:axes]:
                raise UsageError(f"a saved token table of {self._layers} layers has no fitting array {name!r}")
        tokens = arrays["tokens"].tolist()
        valid = bool(np.all((arrays["experts"] >= -1) & (arrays["experts"] < experts)))
        if not valid or len(set(tokens)) != len(tokens):
            raise UsageError("a saved token table holds impossible numbers")
        kept = slice(max(0, len(tokens) - self.max_tokens), None)
        self._rows = OrderedDict((token, row) for row, token in enumerate(tokens[kept]))
        self._seen, self._experts = arrays["seen"][kept].copy(), arrays["experts"][kept].copy()
        self._counts = arrays["counts"][kept].copy()

    def _row(self, token: int) -> int:
        row = self._rows.get(token)
        if row is not None:
            self._rows.move_to_end(token)
            return row
        if len(self._rows) < self.max_tokens:
            row = len(self._rows)
            if row == len(self._seen):
                self._grow(min(max(64, 2 * row), self.max_tokens))
        else:
            _, row = self._rows.popitem(last=False)
        self._experts[row], self._counts[row], self._seen[row] = -1, 0, 0
        self._rows[token] = row
        return row

    def _grow(self, rows: int) -> None:
        more = rows - len(self._seen)
        self._experts = np.concatenate([self._experts, np.full((more, self._layers, self._places), -1, np.int32)])
        self._counts = np.concatenate([self._counts, np.zeros((more, self._layers, self._places), np.uint16)])
        self._seen = np.concatenate([self._seen, np.zeros(more, np.uint32)])


class TokenTable:
    """P(expert | token) for the step that computes on the token, and for the step after it.

    Args:
        experts_per_layer: of the layers with routed experts, in rising order; gives the flat numbers.
        max_bytes: bound on the memory of both relations together.
        max_tokens: bound on the tokens remembered, such as the size of the vocabulary.

    Attributes:
        starts: flat number of the first expert of each layer, and at the end the number of all experts.
        now: experts that a token's own step chose.
        after: experts that the step after it chose.
        counted: tokens counted since the table was made; those of a saved one are not among them.
    """

    def __init__(
        self, experts_per_layer: Sequence[int], *, max_bytes: int = _DEFAULT_BYTES, max_tokens: int = 1 << 20
    ) -> None:
        self.starts = [0, *accumulate(experts_per_layer)]
        self.counted = 0
        layers = len(experts_per_layer)
        rows = min(max_tokens, max_bytes // (2 * (layers * _PLACES * 6 + 4)))
        if rows < 1:
            raise UsageError(f"a token table of {layers} layers does not fit {max_bytes} bytes")
        self.now = ChoiceTable(layers, rows)
        self.after = ChoiceTable(layers, rows)

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return self.starts[-1]

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self.now.nbytes + self.after.nbytes

    def count(self, token: int, experts: NDArray[np.int32], *, previous: int | None) -> None:
        """A token was computed.

        Args:
            token: its id.
            experts: int32 [layers, top_k], flat numbers of the experts that its routers chose.
            previous: id of the token before it in the same text; None if it is the first.
        """
        self.counted += 1
        self.now.count(token, experts)
        if previous is not None:
            self.after.count(previous, experts)

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The content of both relations, for a file; the names begin with `now.` and `after.`."""
        return {
            f"{name}.{key}": array
            for name, table in (("now", self.now), ("after", self.after))
            for key, array in table.as_arrays().items()
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none for this model's layers.

        What was taken before the fault was found stays: each relation is right or wrong by itself.
        """
        for name, table in (("now", self.now), ("after", self.after)):
            prefix = f"{name}."
            part = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
            table.restore(part, experts=self.experts)
