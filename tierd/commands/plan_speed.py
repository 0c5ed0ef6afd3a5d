"""How fast a node will decode: from replayed misses, the drives' bandwidth, and one or more measured runs.

A decode step takes as long as a step with everything in RAM, and on top, for each layer that lacks experts, one message
to the daemon, some work for each expert, and the reads, which go on at the same time on all drives:

    seconds = compute + sum over layers that lack experts of
              max(0, message + lacking * expert + ceil(lacking / drives) * read + slowest)

`read` is the size of a record over the bandwidth of one drive. The others come from runs of the node: of three or more
runs by least squares over their seconds per step, of two with a fixed relation of `message` to `expert`, and of one by
its own split into computing and waiting. `message` is below zero where a node computes on residents for longer than a
message takes, and so hides a part of the reads.

`slowest` is for drives that were not there in these runs. A layer waits for the slowest drive that reads for it; where
what comes on top of reads varies as waits for a processor do (exponentially), the slowest of n takes
1 + 1/2 + ... + 1/n times as long as one does. So `message` grows by that, but never by more than the reads save.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["Lacking", "MeasuredRun", "NodeSpeed", "fit_speed", "load_run"]

Values = NDArray[np.float64]

_NOTHING = 1e-9
_LEAST_STEPS = 4
_EXPERTS_PER_MESSAGE = 6.0
"""A message costs 0.74 ms and an expert beside its read 0.12 ms, as the least of many tries with records of 56 KB."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What `compute-node generate --json` said of a run.

    Attributes:
        name: of the file.
        slots: of the arena.
        seconds: of a decode step.
        wait_seconds: of these, waiting for experts.
    """

    name: str
    slots: int
    seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Lacking:
    """What the decode steps of a replayed trace had to ask for.

    Attributes:
        steps: decode steps.
        requests: layers of steps by how many experts they lacked, at least one.
    """

    steps: int
    requests: Mapping[int, int]

    @property
    def asked(self) -> float:
        """Layers of a step that lack something."""
        return sum(self.requests.values()) / self.steps

    @property
    def experts(self) -> float:
        """Experts that a step lacks."""
        return sum(lacking * count for lacking, count in self.requests.items()) / self.steps

    def reads(self, drives: int) -> float:
        """Reads of a step one after the other, where so many drives read at the same time."""
        return sum(ceil(lacking / drives) * count for lacking, count in self.requests.items()) / self.steps


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """Seconds of the node's part; see the module.

    Attributes:
        compute_seconds: of a step with everything in RAM.
        message_seconds: of a layer that lacks experts.
        expert_seconds: of each expert that it lacks, beside its read.
        drives: that it was measured with.
    """

    compute_seconds: float
    message_seconds: float
    expert_seconds: float
    drives: int = 1

    def step_seconds(self, lacking: Lacking, read_seconds: float, drives: int) -> float:
        """Seconds of a decode step, on average.

        Args:
            lacking: by replay.
            read_seconds: of one record from one drive.
            drives: of the same speed.
        """
        waits = sum(
            max(0.0, self._layer_seconds(missing, read_seconds, drives)) * count
            for missing, count in lacking.requests.items()
        )
        return self.compute_seconds + waits / lacking.steps

    def _layer_seconds(self, missing: int, read_seconds: float, drives: int) -> float:
        """Seconds that a layer waits which lacks so many experts, less what it computes meanwhile."""
        reads, before = ceil(missing / drives), ceil(missing / self.drives)
        more = _of_slowest(min(missing, drives)) / _of_slowest(min(missing, self.drives)) - 1
        slowest = min(max(0.0, self.message_seconds * more), max(0, before - reads) * read_seconds)
        return self.message_seconds + missing * self.expert_seconds + reads * read_seconds + slowest


def load_run(path: Path, fingerprint: str) -> MeasuredRun:
    """Reads what `compute-node generate STORE --arena SIZE --json` printed.

    Raises:
        UsageError: it cannot be read, is nothing of the kind, or is of another store.
    """
    hint = f"Make it by: compute-node generate STORE --arena 25% -f TEXT --json > {path}"
    no_run = f"--measured {path} is not what a run of compute-node printed"
    try:
        content: Any = json.loads(path.read_bytes())
        slots, steps = content["arena_slots"], len(content["token_ids"]) - 1
        decode = content["decode"]
        seconds, waited = float(decode["seconds"]), float(decode["wait_seconds"])
        of = str(content["fingerprint"])
    except OSError as error:
        raise UsageError(f"--measured {path} cannot be read: {error.strerror}", hint=hint) from None
    except KeyError as error:
        raise UsageError(f"{no_run}: it has no {error}", hint=hint) from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{no_run}: {error}", hint=hint) from None
    if of != fingerprint:
        raise UsageError(f"--measured {path} is a run of another store", hint=hint)
    if not isinstance(slots, int) or slots < 1:
        raise UsageError(f"--measured {path} is a run without a daemon, and says nothing of its arena", hint=hint)
    if steps < _LEAST_STEPS or not 0 <= waited <= seconds or seconds <= 0:
        raise UsageError(f"--measured {path} has fewer than {_LEAST_STEPS} decode steps", hint=hint)
    return MeasuredRun(str(path), slots, seconds / steps, waited / steps)


def fit_speed(runs: Sequence[MeasuredRun], lacking: Sequence[Lacking], read_seconds: float, drives: int) -> NodeSpeed:
    """The node's part of the time, as measured.

    Args:
        runs: at least one.
        lacking: by replay of arenas of their sizes, in the same order.
        read_seconds: of one record from one drive.
        drives: that they were measured with.
    """
    asked, experts = np.array([one.asked for one in lacking]), np.array([one.experts for one in lacking])
    seconds, ones = np.array([run.seconds for run in runs]), np.ones(len(runs))
    beside_reads = seconds - read_seconds * np.array([one.reads(drives) for one in lacking])
    own_compute = float(np.mean([run.seconds - run.wait_seconds for run in runs]))
    found = _least_squares([ones, asked, experts], beside_reads, seconds)
    if found is not None and found[0] > 0 and min(found[1:]) >= -_NOTHING:
        return NodeSpeed(found[0], max(0.0, found[1]), max(0.0, found[2]), drives)
    compute = message = share = 0.0
    for share in (1 / _EXPERTS_PER_MESSAGE, 0.0):  # with nothing for an expert where reads hide behind computing
        work = asked + share * experts
        found = _least_squares([ones, work], beside_reads, seconds)
        if found is None or found[0] <= 0:
            some = work > 0
            found = [
                own_compute,
                float(np.mean((beside_reads - own_compute)[some] / work[some])) if some.any() else 0.0,
            ]
        compute, message = found
        if message >= 0:
            break
    return NodeSpeed(compute, message, max(0.0, share * message), drives)


def _of_slowest(number: int) -> float:
    """Mean of the greatest of so many exponential times, of which each has the mean 1."""
    return sum(1 / n for n in range(1, number + 1))


def _least_squares(columns: list[Values], wanted: Values, weights: Values) -> list[float] | None:
    """Factors of the columns that come nearest to what is wanted, as shares of `weights`; None if many do so."""
    if len(wanted) < len(columns):
        return None
    factors, _, rank, _ = np.linalg.lstsq(np.stack(columns, axis=1) / weights[:, None], wanted / weights, rcond=1e-9)
    return [float(factor) for factor in factors] if rank == len(columns) else None
