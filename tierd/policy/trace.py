"""Traces of routing: which token chose which experts, in which step. Written by a node, replayed against policies.

A trace is a numpy archive (.npz) without pickled objects; the first axis of the first five is the token:

=================  ==================================================================================
`tokens`           integer [tokens], the input token of each row
`experts`          unsigned [tokens, layers, top_k], expert numbers within their layer, in router order
`steps`            int64 [tokens], rising; rows of one step were computed together
`prefill`          bool [tokens], whether the step computed a prompt; the same for all rows of a step
`sequences`        int64 [tokens], which text the row belongs to
`layers`           int64 [layers], rising: the model's own layer numbers
`layer_experts`    int64 [layers], routed experts of each layer
`expert_bytes`     int64 scalar, size of an expert's record; 0 if not known
=================  ==================================================================================

Instead of the arrays from `steps` on, a plain archive may hold the scalar `window`: texts of so many tokens, each
decoded token by token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.array_files import read_arrays
from tierd.errors import UsageError

__all__ = ["Trace", "TraceWriter", "join_traces", "load_trace"]

_MOST_BYTES: Final = 4 << 30
_MOST_EXPERTS: Final = 1 << 22
_EXTRA: Final = ("steps", "prefill", "sequences", "layers", "layer_experts", "expert_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded run; see the module for the arrays.

    Attributes:
        name: what messages call it.
    """

    name: str
    tokens: NDArray[np.int64]
    experts: NDArray[np.int32]
    steps: NDArray[np.int64]
    prefill: NDArray[np.bool_]
    sequences: NDArray[np.int64]
    layers: tuple[int, ...]
    layer_experts: tuple[int, ...]
    expert_bytes: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def experts_total(self) -> int:
        """Routed experts of all layers."""
        return sum(self.layer_experts)

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return int(self.experts.shape[2])

    def flat(self) -> NDArray[np.int32]:
        """Flat expert numbers, int32 [tokens, layers, top_k]."""
        starts = np.array([0, *accumulate(self.layer_experts)][:-1], np.int32)
        return self.experts + starts[None, :, None]

    def step_bounds(self) -> list[int]:
        """Row at which each step begins, and at the end the number of rows."""
        begins = np.flatnonzero(np.diff(self.steps)) + 1
        return [0, *begins.tolist(), len(self)] if len(self) else [0]

    def head(self, tokens: int) -> Trace:
        """The first rows of it, whole steps only."""
        if tokens >= len(self):
            return self
        end = max(bound for bound in self.step_bounds() if bound <= tokens)
        return self._with(slice(0, end), self.steps[:end], self.prefill[:end])

    def with_prompts(self, tokens: int, rows: int) -> Trace:
        """The same choices as if the first `tokens` of each text had been a prompt, `rows` of them to a step."""
        steps, prefill = np.empty(len(self), np.int64), np.zeros(len(self), np.bool_)
        begins = [0, *(np.flatnonzero(np.diff(self.sequences)) + 1).tolist(), len(self)]
        step = 0
        for begin, end in pairwise(begins):
            for row in range(begin, end):
                prefill[row] = row - begin < tokens
                first = row == begin or (row - begin) % rows == 0 or not prefill[row]
                step += first
                steps[row] = step
        return self._with(slice(None), steps, prefill)

    def _with(self, rows: slice, steps: NDArray[np.int64], prefill: NDArray[np.bool_]) -> Trace:
        return Trace(
            self.name, self.tokens[rows], self.experts[rows], steps, prefill, self.sequences[rows],
            self.layers, self.layer_experts, self.expert_bytes,
        )  # fmt: skip


def load_trace(path: Path) -> Trace:
    """Reads and checks a trace.

    Raises:
        UsageError: the file cannot be read, or is no trace; says what is wrong.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: cannot be read as a trace: it is no file")
    try:
        arrays = read_arrays(path, limit=_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as a trace: {error}") from None
    return _checked(str(path), arrays)


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One run after the other, in the same arena; UsageError if they are of different models."""
    first = traces[0]
    if len(traces) == 1:
        return first
    steps: list[NDArray[np.int64]] = []
    sequences: list[NDArray[np.int64]] = []
    step = sequence = 0
    for trace in traces:
        if (trace.layers, trace.layer_experts, trace.top_k) != (first.layers, first.layer_experts, first.top_k):
            raise UsageError(f"{first.name} and {trace.name} are traces of different models")
        if len(trace):
            steps.append(trace.steps - trace.steps[0] + step)
            sequences.append(trace.sequences - trace.sequences.min() + sequence)
            step, sequence = int(steps[-1][-1]) + 1, int(sequences[-1].max()) + 1
    return Trace(
        " + ".join(trace.name for trace in traces),
        np.concatenate([trace.tokens for trace in traces]),
        np.concatenate([trace.experts for trace in traces]),
        np.concatenate([np.zeros(0, np.int64), *steps]),
        np.concatenate([trace.prefill for trace in traces]),
        np.concatenate([np.zeros(0, np.int64), *sequences]),
        first.layers,
        first.layer_experts,
        max(trace.expert_bytes for trace in traces),
    )


def _checked(name: str, arrays: dict[str, NDArray[Any]]) -> Trace:
    tokens, experts = _integers(name, arrays, "tokens", 1), _integers(name, arrays, "experts", 3)
    count, layers, top_k = experts.shape
    if not (len(tokens) == count and layers >= 1 and top_k >= 1):
        raise UsageError(f"{name}: {len(tokens)} tokens and experts of shape {experts.shape} do not fit together")
    if "window" in arrays and not any(extra in arrays for extra in _EXTRA):
        window = int(_integers(name, arrays, "window", 0))
        if window < 1:
            raise UsageError(f"{name}: a window of {window} tokens cannot be")
        arrays = arrays | {
            "steps": np.arange(count),
            "prefill": np.zeros(count, np.bool_),
            "sequences": np.arange(count) // window,
            "layers": np.arange(layers),
            "layer_experts": np.full(layers, int(experts.max(initial=top_k - 1)) + 1),
            "expert_bytes": np.array(0),
        }
    steps, sequences = _integers(name, arrays, "steps", 1), _integers(name, arrays, "sequences", 1)
    numbers, sizes = _integers(name, arrays, "layers", 1), _integers(name, arrays, "layer_experts", 1)
    expert_bytes, prefill = int(_integers(name, arrays, "expert_bytes", 0)), arrays.get("prefill")
    if prefill is None or prefill.dtype != np.bool_:
        raise UsageError(f"{name}: is no trace: it has no array of truth values `prefill`")
    same_step = steps[1:] == steps[:-1]
    ranked = np.sort(experts, axis=2)
    problems = {
        "arrays of different lengths": not len(steps) == len(sequences) == len(prefill) == count,
        "layers and their experts do not fit": not len(numbers) == len(sizes) == layers,
        "steps fall": bool(np.any(steps[1:] < steps[:-1])),
        "layers do not rise": bool(np.any(numbers[1:] <= numbers[:-1])),
        "too many experts": bool(np.any(sizes < 1)) or int(sizes.sum()) > _MOST_EXPERTS,
        "a negative number": min(expert_bytes, int(tokens.min(initial=0))) < 0,
    }
    if not any(problems.values()):
        problems = {
            "an expert outside its layer": bool(np.any(experts < 0) or np.any(experts >= sizes[None, :, None])),
            "an expert twice in one layer": bool(np.any(ranked[:, :, 1:] == ranked[:, :, :-1])),
            "a step of both kinds": bool(np.any(same_step & (prefill[1:] != prefill[:-1]))),
        }
    for problem, found in problems.items():
        if found:
            raise UsageError(f"{name}: is no trace: {problem}")
    return Trace(
        name, tokens, experts.astype(np.int32), steps, prefill, sequences,
        tuple(numbers.tolist()), tuple(sizes.tolist()), expert_bytes,
    )  # fmt: skip


def _integers(name: str, arrays: dict[str, NDArray[Any]], key: str, axes: int) -> NDArray[np.int64]:
    array = arrays.get(key)
    if array is None or array.dtype.kind not in "iu" or array.ndim != axes:
        raise UsageError(f"{name}: is no trace: it has no integer array `{key}` of {axes} axes")
    return array.astype(np.int64)


class TraceWriter:
    """Collects a run's routing in memory and writes it as one file.

    Args:
        path: where to; replaced as a whole by `save`.
        layers: model numbers of the layers with routed experts.
        layer_experts: routed experts of each.
        top_k: experts per token and layer.
        expert_bytes: size of a record.
        max_bytes: bound on the memory of what is collected; later steps are not recorded.
    """

    def __init__(
        self, path: Path, *, layers: Sequence[int], layer_experts: Sequence[int], top_k: int, expert_bytes: int,
        max_bytes: int = 256 << 20,
    ) -> None:  # fmt: skip
        self.path = path
        self.full = False
        self._layers, self._layer_experts = np.array(layers, np.int64), np.array(layer_experts, np.int64)
        self._expert_bytes = np.array(expert_bytes, np.int64)
        self._type = (
            np.uint8 if max(layer_experts) <= 1 << 8 else np.uint16 if max(layer_experts) <= 1 << 16 else np.uint32
        )
        self._top_k = top_k
        self._row_bytes = len(layers) * top_k * np.dtype(self._type).itemsize + 21
        self._room = max_bytes // self._row_bytes
        self._tokens: list[int] = []
        self._steps: list[int] = []
        self._prefill: list[bool] = []
        self._sequences: list[int] = []
        self._experts: list[NDArray[Any]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int], experts: NDArray[Any], *, sequence: int, prefill: bool) -> None:
        """A step ended: its tokens, and integer [tokens, layers, top_k] expert numbers within their layers."""
        if self.full or len(self._tokens) + len(tokens) > self._room:
            self.full = True
            return
        step = self._steps[-1] + 1 if self._steps else 0
        self._tokens += tokens
        self._steps += [step] * len(tokens)
        self._prefill += [prefill] * len(tokens)
        self._sequences += [sequence] * len(tokens)
        self._experts.append(experts.astype(self._type))

    def save(self) -> None:
        """Writes the file; UsageError if it cannot be written. An older file at its place stays whole until then."""
        empty = np.zeros((0, len(self._layers), self._top_k), self._type)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(
                    file,
                    tokens=np.array(self._tokens, np.int64),
                    experts=np.concatenate([empty, *self._experts]),
                    steps=np.array(self._steps, np.int64),
                    prefill=np.array(self._prefill, np.bool_),
                    sequences=np.array(self._sequences, np.int64),
                    layers=self._layers,
                    layer_experts=self._layer_experts,
                    expert_bytes=self._expert_bytes,
                )
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):  # where nothing can be written nothing can be removed either
                temporary.unlink(missing_ok=True)
            raise UsageError(f"--trace {self.path}: cannot be written: {error.strerror}") from None
