"""The daemon's gRPC servers: one for nodes and, where others than this user can reach it, another for this host."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tierd.addresses import Address, default_socket, parse_address
from tierd.api import admin_pb2, admin_pb2_grpc, session_pb2, session_pb2_grpc, store_pb2, store_pb2_grpc
from tierd.door import Door
from tierd.errors import UsageError
from tierd.listening import Listener, Protection
from tierd.rpc import server_options
from tierd.settings import ServeSettings

__all__ = ["Servers"]

# Calls at once beside the sessions' streams; more are refused at the door.
_OTHER_CALLS = 256
_STOP_SECONDS = 1.0


class Servers:
    """Where nodes and operators are answered.

    Operators' calls stop the daemon, resize it and read its drives. Where the nodes' address asks for a token or can
    be reached from elsewhere, they are not offered there, but by a server of their own on a Unix socket, which serves
    the nodes of this host as well: whatever strangers do to the other one, these come through.

    Args:
        store: directory of the store, whose name an unnamed socket gets.
        settings: of `tierd serve`.

    Attributes:
        address: where nodes connect; the port is known after `bind`.
        local: the Unix socket for this host, if that is not the same.
        door: whom the nodes' server admits.

    Raises:
        UsageError: options that cannot be met; nothing was made yet.
    """

    def __init__(self, store: Path, settings: ServeSettings) -> None:
        self._settings = settings
        self.address = parse_address(settings.listen, option="--listen") if settings.listen else default_socket(store)
        self._protection = Protection(
            certificate=settings.tls_cert,
            key=settings.tls_key,
            client_ca=settings.tls_client_ca,
            token_file=settings.token_file,
            insecure=settings.insecure,
        )
        self._protection.check(self.address)
        guarded = self._protection.certificates() is not None or settings.token_file is not None
        if guarded and self.address.path is not None:
            raise UsageError(
                f"--tls-cert and --token-file go with HOST:PORT; {self.address} is this user's alone as it is"
            )
        self.local: Address | None = None
        if settings.local:
            self.local = parse_address(settings.local, option="--local")
            if self.local.path is None:
                raise UsageError(f"--local {settings.local}: it is a Unix socket, unix:PATH")
        elif guarded or not self.address.local:
            self.local = default_socket(store)
        self.door = Door(settings.token_file)
        self._listeners: list[Listener] = []
        self._servers: list[grpc.aio.Server] = []

    def bind(self) -> None:
        """Take the addresses; nobody is answered yet.

        Raises:
            UsageError: an address cannot be had.
        """
        self.address = self._bind(self.address, self._protection)
        if self.local is not None:
            self.local = self._bind(self.local, Protection())

    def add(
        self,
        sessions: session_pb2_grpc.SessionServiceServicer,
        store: store_pb2_grpc.StoreServiceServicer,
        admin: admin_pb2_grpc.AdminServiceServicer,
    ) -> None:
        """Say who answers what."""
        self._health = health.aio.HealthServicer()
        for server in self._servers:
            session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
            store_pb2_grpc.add_StoreServiceServicer_to_server(store, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._servers[-1])
        if self._settings.reflection:
            nodes = [session_pb2.DESCRIPTOR, store_pb2.DESCRIPTOR]
            for server in self._servers[:-1]:
                _reflect(server, nodes)
            _reflect(self._servers[-1], [*nodes, admin_pb2.DESCRIPTOR])

    async def start(self) -> None:
        """Begin to answer."""
        for server in self._servers:
            await server.start()

    async def serving(self) -> None:
        """Tell who asks for it that all is well."""
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stopping(self) -> None:
        """Tell who asks for it that this will end soon."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """End all calls, within a second."""
        for server in self._servers:
            await server.stop(_STOP_SECONDS)

    def close(self) -> None:
        """Let others have the addresses."""
        for listener in self._listeners:
            listener.close()

    def _bind(self, address: Address, protection: Protection) -> Address:
        server = grpc.aio.server(
            options=server_options(keepalive_seconds=self._settings.keepalive_seconds),
            maximum_concurrent_rpcs=self._settings.max_sessions + _OTHER_CALLS,
        )
        self._listeners.append(Listener.bind(server, address, protection))
        self._servers.append(server)
        return self._listeners[-1].address


def _reflect(server: grpc.aio.Server, files: list[FileDescriptor]) -> None:
    from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 - a tenth of a second that few want

    names = [service.full_name for file in files for service in file.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
