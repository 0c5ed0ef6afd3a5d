"""The cluster of Ray that a fleet runs on: one of its own on this host, or one that is there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final

import ray

from tierd.errors import DaemonUnavailable
from tierd.fleet.fleet_file import FleetFile
from tierd.fleet.own import keep_own, own_file

__all__ = ["joined", "own_cluster"]

_ATTEMPTS: Final = 3
_OBJECT_BYTES: Final = 128 << 20
"""Of Ray's object store: a fleet puts nothing there."""


@contextlib.contextmanager
def own_cluster(fleet: FleetFile) -> Iterator[None]:
    """A cluster of this host alone, with all the resources that the file names; it ends with the block.

    Where it listens, and whom it admits, `tierd.fleet.own.begin_own` has said before Ray was imported.

    Raises:
        DaemonUnavailable: Ray does not start.
    """
    for attempt in range(_ATTEMPTS):
        try:
            _init(
                address="local",
                namespace=fleet.namespace,
                include_dashboard=False,
                object_store_memory=_OBJECT_BYTES,
                resources=_wanted(fleet),
            )
            break
        except Exception as error:
            # Its agents have 15 s, which is too little for their first import on a slow host.
            ray.shutdown()
            if attempt == _ATTEMPTS - 1:
                raise DaemonUnavailable(f"Ray did not start on this host: {error}") from error
    try:
        keep_own(fleet, ray.get_runtime_context().gcs_address)
        yield
    finally:
        own_file(fleet).unlink(missing_ok=True)
        ray.shutdown()


@contextlib.contextmanager
def joined(address: str, *, namespace: str) -> Iterator[None]:
    """A connection to the cluster at that address, or `auto`.

    Raises:
        DaemonUnavailable: there is none.
    """
    try:
        _init(address=address, namespace=namespace)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DaemonUnavailable(
            f"no cluster of Ray answers at {address}: {error}", hint="Start one: see deploy/ray/README.md."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _init(**settings: Any) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **settings)


def _wanted(fleet: FleetFile) -> dict[str, float]:
    """Resources that all members and the entrance take together."""
    wanted: dict[str, float] = {}
    for taken, replicas in [
        *((group.on, group.replicas) for group in (*fleet.worker, *fleet.node)),
        (fleet.entrance.on, fleet.entrance.replicas),
    ]:
        for name, amount in taken.items():
            wanted[name] = wanted.get(name, 0.0) + amount * replicas
    return wanted
