"""Settings that `tierd tune` found best: one small file per machine and store, used unless somebody says otherwise."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierd.state import state_directory
from tierd.store.checksums import sha256
from tierd.store.writing import write_atomic

__all__ = ["NodeTuned", "Profile", "ServeTuned", "load_profile", "machine_key", "profile_path", "save_profile"]

_MOST_BYTES: Final = 1 << 16


class ServeTuned(BaseModel):
    """Settings of `tierd serve`, as `tierd.settings` names and describes them; None for those left as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arena: str | None = None
    ram: str | None = None
    drive_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    direct: bool | None = None
    guess: Literal["off", "on", "auto"] | None = None


class NodeTuned(BaseModel):
    """Settings of `compute-node`; None for those left as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    prefetch: Literal["off", "on", "auto", "tokens"] | None = None


class Profile(BaseModel):
    """What was found.

    Attributes:
        format: of this file.
        fingerprint: of the store.
        serve: settings of the daemon that differ from their defaults.
        node: settings of the node that do.
        limit: the resource that bounds decoding with these: drive, memory, compute or messages.
        tokens_per_second: by tuned and by default settings, in the last comparison.
        made: when, ISO 8601 in UTC.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    fingerprint: str
    serve: ServeTuned
    node: NodeTuned
    limit: str
    tokens_per_second: dict[str, float]
    made: str


def machine_key() -> str:
    """Changes with the processor, its cores and the memory: a home folder may belong to many machines."""
    facts = [platform.node(), _line("/proc/cpuinfo", "model name"), sorted(os.sched_getaffinity(0)),
             _line("/proc/meminfo", "MemTotal")]  # fmt: skip
    return sha256(json.dumps(facts).encode())[:16]


def profile_path(fingerprint: str) -> Path:
    """Where the profile of a store lies, for this machine."""
    return state_directory() / "profiles" / f"{machine_key()}-{fingerprint[:16]}.json"


def load_profile(fingerprint: str) -> tuple[Profile | None, str]:
    """The profile of a store for this machine, and what is wrong with its file; nothing is if there is none."""
    path = profile_path(fingerprint)
    try:
        with path.open("rb") as file:
            profile = Profile.model_validate_json(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path}: the tuned settings cannot be read: {error.strerror}"
    except ValidationError as error:
        return None, f"{path}: no tuned settings: {error.errors()[0]['msg']}; `tierd tune` makes them again"
    if profile.fingerprint != fingerprint:
        return None, f"{path}: these settings were tuned for another store"
    return profile, ""


def save_profile(profile: Profile) -> Path:
    """Replace the store's profile for this machine; DriveError or OSError if it cannot be written."""
    path = profile_path(profile.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, profile.model_dump_json(indent=1, exclude_none=True).encode())
    return path


def _line(file: str, name: str) -> str:
    """The value of the first line NAME: VALUE of a file of the kernel; empty if there is none."""
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as lines:
            return next((v.strip() for k, _, v in (line.partition(":") for line in lines) if k.strip() == name), "")
    except OSError:
        return ""
