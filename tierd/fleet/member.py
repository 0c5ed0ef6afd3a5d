"""What one actor of a fleet is to run, in plain values that travel through Ray."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from tierd.fleet.fleet_file import HERE, FleetFile, Members, NodeGroup, Patience, Setting, WorkerGroup, flags

__all__ = ["Member", "State", "members_of"]

State: TypeAlias = Literal["starting", "serving", "refused", "ending", "unreachable"]
"""`refused`: its program was told something that cannot be; `unreachable`: Ray starts it, or has no host for it."""

_PROGRAM: Final = "compute_node"


@dataclass(frozen=True, slots=True)
class Member:
    """One worker or node.

    Attributes:
        name: in the fleet's namespace.
        namespace: of the fleet.
        kind: of program.
        store: as the program is given it.
        listen: where its program listens; the host may be `host`.
        flags: further words.
        peers: workers that it uses, by name.
        on: resources of Ray.
        patience: with its program.
        ca: PEM file of the authority that has signed a worker's own certificate, and `ca_name`, to look at it; empty
            where that cannot be.
        ca_name: that this certificate has.
        protected: it speaks TLS.
    """

    name: str
    namespace: str
    kind: Literal["worker", "node"]
    store: str
    listen: str
    flags: tuple[str, ...]
    peers: tuple[str, ...]
    on: dict[str, float]
    patience: dict[str, float]
    ca: str = ""
    ca_name: str = ""
    protected: bool = False

    @property
    def digest(self) -> str:
        """Of everything: an actor with another one must be replaced."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def bounds(self) -> Patience:
        """`patience` with names."""
        return Patience(**self.patience)

    def words(self, host: str, files: Mapping[str, Path]) -> list[str]:
        """The command line.

        Args:
            host: address of the host on which Ray has put it.
            files: by peer, a file that holds its address.
        """
        place, _, port = self.listen.rpartition(":")
        listen = f"{f'[{host}]' if ':' in host else host}:{port}" if place == HERE else self.listen
        words = [sys.executable, "-m", _PROGRAM]
        if self.kind == "worker":
            return [*words, "worker", self.store, "--listen", listen, *self.flags]
        words += ["serve", self.store, "--http", listen, *self.flags]
        for peer in self.peers:
            words += ["--worker", f"@{files[peer]}"]
        return words


def members_of(fleet: FleetFile) -> list[Member]:
    """All workers, then all nodes."""
    peers = {group.name: group.members for group in fleet.worker}
    found = []
    for group in fleet.worker:
        found += [_member(fleet, group, name, group.listen, ()) for name in group.members]
    for nodes in fleet.node:
        mine = tuple(peer for name in nodes.workers for peer in peers[name])
        found += [_member(fleet, nodes, name, nodes.http, mine) for name in nodes.members]
    return found


def _member(fleet: FleetFile, group: Members, name: str, listen: str, peers: tuple[str, ...]) -> Member:
    worker = isinstance(group, WorkerGroup)
    protection = fleet.protection.of_workers() if worker else fleet.protection.of_nodes()
    settings: dict[str, Setting] = {**protection, **group.settings}
    # A worker that asks for certificates of those who call cannot be looked at: an actor has none.
    seen = "tls_client_ca" not in settings
    return Member(
        name=name,
        namespace=fleet.namespace,
        kind="worker" if worker else "node",
        store=group.store,
        listen=listen,
        flags=tuple(flags(settings)),
        peers=peers if isinstance(group, NodeGroup) else (),
        on=dict(group.on),
        patience=fleet.patience.model_dump(),
        ca=str(settings.get("tls_ca", "")) if seen else "",
        ca_name=str(settings.get("tls_name", "")),
        protected="tls_cert" in settings,
    )
