"""Faults on demand, as a small file says: which drive, which reads, what happens. Seeded, and the same every time.

seed = 7

[[fault]]
kind = "eio"            # eio | short | flip | delay | hang | vanish
drive = "mirror1"       # all drives without it
probability = 0.1       # of the reads that match the rest; all without it
experts = [5, 6]        # flat numbers
shards = [0]
after = 100             # leave this drive's first 100 matching reads alone
times = 3               # then happen so often at most
from_seconds = 10       # and only in this part of the run
until_seconds = 20
seconds = 0.2           # for delay, and for a hang that ends by itself
errno = "EAGAIN"        # for eio
"""

from __future__ import annotations

import errno
import json
import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tierd.devices.device import RecordRead
from tierd.errors import UsageError
from tierd.small_files import read_at_most

__all__ = ["FaultPlan", "FaultRule", "ThrottleRule", "read_fault_plan"]

FaultKind = Literal["eio", "short", "flip", "delay", "hang", "vanish"]
_MAX_BYTES: Final = 1 << 20
_Number = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, le=86400)]


class FaultRule(BaseModel):
    """One kind of fault and the reads that it befalls; the module's docstring explains the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FaultKind
    drive: str | None = None
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    experts: frozenset[_Number] | None = None
    shards: frozenset[_Number] | None = None
    after: _Number = 0
    times: _Number | None = None
    from_seconds: _Seconds = 0.0
    until_seconds: _Seconds | None = None
    seconds: _Seconds | None = None
    errno: str = "EIO"

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.errno not in errno.errorcode.values():
            raise ValueError(f"errno {self.errno} is not one of this system's names, such as EIO")
        if self.kind == "delay" and self.seconds is None:
            raise ValueError("a delay needs `seconds`")
        return self

    @property
    def error_number(self) -> int:
        """The number behind `errno`."""
        return int(getattr(errno, self.errno))

    def matches(self, drive: str, read: RecordRead, seconds: float) -> bool:
        """Whether a read falls under this rule, before counting and chance."""
        return (
            (self.drive is None or self.drive == drive)
            and (self.experts is None or read.expert in self.experts)
            and (self.shards is None or read.shard in self.shards)
            and seconds >= self.from_seconds
            and (self.until_seconds is None or seconds < self.until_seconds)
        )


class ThrottleRule(BaseModel):
    """A bound on one drive, or on each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drive: str | None = None
    bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    latency: _Seconds = 0.0


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: _Number = 0
    fault: tuple[FaultRule, ...] = ()
    throttle: tuple[ThrottleRule, ...] = ()


class FaultPlan:
    """Decides for each read which faults befall it. Not for several threads at once without a lock.

    Chance depends on the seed, the rule, the drive, the expert and how often that drive has read that expert before,
    so it does not matter in which order threads or drives come.

    Args:
        rules: in the order in which they are asked.
        seed: of chance.
        throttles: for `throttle`.
    """

    def __init__(self, rules: tuple[FaultRule, ...], seed: int = 0, throttles: tuple[ThrottleRule, ...] = ()) -> None:
        self.rules = rules
        self.throttles = throttles
        self.seed = seed
        self._matched: dict[tuple[int, str], int] = {}
        self._happened: dict[tuple[int, str], int] = {}
        self._reads: dict[tuple[str, int], int] = {}

    def __repr__(self) -> str:
        return f"<FaultPlan seed {self.seed}: {', '.join(rule.kind for rule in self.rules)}>"

    def decide(self, drive: str, read: RecordRead, seconds: float) -> list[FaultRule]:
        """The faults of this read, in the order of the rules.

        Args:
            drive: name of the drive.
            read: what is read.
            seconds: since the start of the run.
        """
        again = self._reads.get((drive, read.expert), 0)
        self._reads[drive, read.expert] = again + 1
        faults = []
        for number, rule in enumerate(self.rules):
            if not rule.matches(drive, read, seconds):
                continue
            key = number, drive
            self._matched[key] = self._matched.get(key, 0) + 1
            if self._matched[key] <= rule.after:
                continue
            if rule.times is not None and self._happened.get(key, 0) >= rule.times:
                continue
            if self._chance(number, drive, read.expert, again) >= rule.probability:
                continue
            self._happened[key] = self._happened.get(key, 0) + 1
            faults.append(rule)
        return faults

    def throttle(self, drive: str) -> ThrottleRule | None:
        """The bound of a drive: the first one that fits."""
        return next((rule for rule in self.throttles if rule.drive in (None, drive)), None)

    def _chance(self, number: int, drive: str, expert: int, again: int) -> float:
        return xxhash.xxh3_64_intdigest(f"{self.seed} {number} {drive} {expert} {again}".encode()) / 2**64


def read_fault_plan(path: Path) -> FaultPlan:
    """A plan from a TOML file, or from a JSON file of the same shape.

    Raises:
        UsageError: the file cannot be read, or a field is wrong; it is named.
    """
    try:
        text = read_at_most(path, _MAX_BYTES).decode()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as a fault plan: {error}") from None
    try:
        plan = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise UsageError(f"{path}: {field or 'content'}: {first['msg']}") from None
    return FaultPlan(plan.fault, plan.seed, plan.throttle)
