"""Looks at a running program from outside: does it still answer?"""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tierd.access import Access
from tierd.addresses import Address
from tierd.client.loop_thread import LoopThread
from tierd.errors import TierdError
from tierd.fleet.member import Member

__all__ = ["answers", "http_answers"]


def answers(member: Member, address: Address, seconds: float) -> bool:
    """Whether the member's program answers within so many seconds: a node its /health, a worker gRPC's health service.

    A worker that speaks TLS is only looked at where its settings name the authority, `tls_ca`, and ask for no
    certificates of clients, `tls_client_ca`.
    """
    if member.kind == "node":
        return http_answers(address.host, address.port, "/health", seconds)
    if member.protected and not member.ca:
        return True
    access = Access(ca=Path(member.ca), name=member.ca_name) if member.protected else Access(plaintext=True)
    try:
        loop = LoopThread.shared()
        return loop.run(_worker_answers(access, address, seconds), seconds=seconds + 1, what=f"looking at {address}")
    except TierdError:
        return False


def http_answers(host: str, port: int, path: str, seconds: float) -> bool:
    """Whether a GET is answered with 200 within so many seconds."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


async def _worker_answers(access: Access, address: Address, seconds: float) -> bool:
    async with access.channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types do not know its calls
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
