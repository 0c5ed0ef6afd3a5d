"""Where a replica of Ray Serve listens for other replicas: on loopback, where the cluster is this host's alone."""

from __future__ import annotations

import os
from typing import Any

from tierd.fleet.own import LOOPBACK_VARIABLE

__all__ = ["keep_replica_to_loopback"]


def keep_replica_to_loopback() -> None:
    """In the replica's process, before it begins to listen. Serve 2.60 has no setting for it: it takes all addresses.

    Elsewhere the cluster's token guards that port.
    """
    if os.environ.get(LOOPBACK_VARIABLE) != "0":
        return
    from ray.serve._private import replica  # noqa: PLC0415 - a replica has it loaded; others need not load it

    add_port = replica.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    replica.add_port_to_grpc_server = add_loopback_port
