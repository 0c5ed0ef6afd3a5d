"""A step as data: segments of ops in order, between which the engine does what needs Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compute_node.kernels.segment import Segment

__all__ = ["Program", "Segment"]


class Program:
    """A whole step: segments in order, between which the engine fetches what the next one needs."""

    __slots__ = ("segments",)

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def describe(self) -> str:
        """One line per op: segment, op, kernel, units."""
        lines = []
        for segment in self.segments:
            lines.append(f"{segment.name}:")
            lines += [
                f"  {op.name}  [{op.kernel}, {op.units} units{' per row' if op.per_row else ''}]" for op in segment.ops
            ]
        return "\n".join(lines)
