"""A fleet with a cluster of its own on this host: kept to loopback and to who has its token. Knows nothing of Ray.

All of it goes through the environment, which Ray reads when it is imported.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Final

from tierd.addresses import parse_address, runtime_directory
from tierd.errors import DaemonUnavailable
from tierd.fleet.fleet_file import FleetFile

__all__ = ["LOOPBACK_VARIABLE", "begin_own", "expect_loopback", "find_own", "keep_own", "own_file"]

LOOPBACK_VARIABLE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray 2.60 listens on the host's address in the network even where it is told 127.0.0.1, unless it believes to be on a
system on which it supports no clusters of several hosts."""
_TOKEN_BYTES: Final = 32


def own_file(fleet: FleetFile) -> Path:
    """Where such a fleet says how to reach its cluster, to this user alone; it is up as long as the file is there."""
    return runtime_directory() / f"fleet-{fleet.name}.json"


def begin_own() -> None:
    """A cluster that this process starts will listen on loopback, and admit those that show a new token."""
    _settle(secrets.token_hex(_TOKEN_BYTES))


def keep_own(fleet: FleetFile, address: str) -> None:
    """Tell later commands where the cluster is."""
    file = own_file(fleet)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as told:
        json.dump({"ray": address, "token": os.environ["RAY_AUTH_TOKEN"]}, told)
    part.rename(file)


def find_own(fleet: FleetFile) -> str:
    """The address of the fleet's cluster; this process may connect to it from now on.

    Raises:
        DaemonUnavailable: it is not up.
    """
    try:
        told = json.loads(own_file(fleet).read_text())
        _settle(str(told["token"]))
        return str(told["ray"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DaemonUnavailable(
            f"the fleet {fleet.name} is not up on this host: {error}", hint="Start it with `tierd fleet up FILE`."
        ) from error


def expect_loopback(fleet: FleetFile) -> None:
    """Let this process connect to a cluster that listens on loopback only, if the file says that it is there."""
    if fleet.ray not in ("own", "auto") and parse_address(fleet.ray, option="ray").local:
        os.environ[LOOPBACK_VARIABLE] = "0"


def _settle(token: str) -> None:
    os.environ[LOOPBACK_VARIABLE] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
