"""A store seen through its daemon: manifest, text files and dense weights, checked on arrival."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import numpy as np

from tierd.addresses import Address
from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.client.loop_thread import LoopThread
from tierd.errors import ChecksumMismatch, DaemonUnavailable, LimitExceeded, StoreDamaged
from tierd.rpc import CHANNEL_OPTIONS, PROTOCOL, error_of, read_safely
from tierd.store.checksums import xxh3
from tierd.store.manifest import Manifest, parse_manifest
from tierd.store.store import DenseTensor

__all__ = ["RemoteStore"]

_SECONDS = 120.0
_CONNECT_SECONDS = 10.0
_DTYPES = {"f32": "<f4", "bf16": "<u2", "i8": "i1", "fp8": "u1", "i64": "<i8", "i32": "<i4", "u8": "u1"}


class RemoteStore:
    """What a node needs beside the experts, read over gRPC once at start."""

    def __init__(self, address: Address, loop: LoopThread) -> None:
        self._address = address
        self._loop = loop
        described = loop.run(self._describe(), seconds=_CONNECT_SECONDS + 5, what=f"describing {address}")
        if described.protocol != PROTOCOL:
            raise DaemonUnavailable(f"{address} speaks protocol {described.protocol}, this node {PROTOCOL}")
        self.manifest: Manifest = parse_manifest(described.manifest, str(address))
        self.fingerprint: str = self.manifest.fingerprint
        self.tiers = list(described.tiers)
        self.slots = int(described.slots)
        self.arena_bytes = int(described.arena_bytes)
        self._dense = {info.name: info for info in self.manifest.dense}
        self._files = {file.name for file in self.manifest.files}

    def __repr__(self) -> str:
        return f"<RemoteStore {self._address} {self.fingerprint[:12]}>"

    def read_file(self, name: str) -> bytes:
        """A text file of the store; LimitExceeded if the manifest does not list it."""
        if name not in self._files:
            raise LimitExceeded(f"{self._address}: the store has no file {name!r}")
        return self._loop.run(self._file(name), seconds=_SECONDS, what=f"reading {name} from {self._address}")

    def read_dense(self, name: str) -> DenseTensor:
        """A dense tensor with its scales.

        Raises:
            LimitExceeded: the store has no tensor of that name.
            ChecksumMismatch: the bytes that came are not the converted ones.
        """
        info = self._dense.get(name)
        if info is None:
            raise LimitExceeded(f"{self._address}: the store has no dense tensor {name!r}")
        scales = None if info.scales is None else self._tensor(info.scales)
        return DenseTensor(self._tensor(name), info.dtype, scales)

    def _tensor(self, name: str) -> np.ndarray:
        info = self._dense[name]
        what = f"reading {name} from {self._address}"
        data = self._loop.run(self._dense_bytes(name, info.nbytes), seconds=_SECONDS, what=what)
        if xxh3(data) != int(info.xxh3, 16):
            raise ChecksumMismatch(f"{name} came damaged from {self._address}", length=info.nbytes)
        aligned = np.empty(info.nbytes + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        aligned[start : start + info.nbytes] = np.frombuffer(data, np.uint8)
        return aligned[start : start + info.nbytes].view(_DTYPES[info.dtype]).reshape(info.shape)

    async def _describe(self) -> pb.DescribeResponse:
        async with self._channel() as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            try:
                return await stub.Describe(pb.DescribeRequest(), timeout=_CONNECT_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise error_of(error, str(self._address)) from error

    async def _file(self, name: str) -> bytes:
        async with self._channel() as channel:
            call = store_pb2_grpc.StoreServiceStub(channel).ReadFile(pb.ReadFileRequest(name=name), timeout=_SECONDS)
            return await self._collect(call, name)

    async def _dense_bytes(self, name: str, nbytes: int) -> bytes:
        async with self._channel() as channel:
            request = pb.ReadDenseRequest(names=[name])
            call = store_pb2_grpc.StoreServiceStub(channel).ReadDense(request, timeout=_SECONDS)
            return await self._collect(call, name, nbytes)

    async def _collect(
        self,
        call: Any,  # a call of ReadFile or ReadDense; the stubs' call types are invariant in the request
        name: str,
        expected: int | None = None,
    ) -> bytes:
        parts: list[bytes] = []
        received, total = 0, expected or 0
        try:
            while True:
                message = await read_safely(call)
                if not isinstance(message, pb.ReadFileResponse | pb.ReadDenseResponse):
                    break
                total = message.total_bytes
                received += len(message.data)
                if expected is not None and total != expected:
                    raise StoreDamaged(f"{self._address} sends {total} bytes of {name}; the manifest says {expected}")
                parts.append(message.data)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(self._address)) from error
        finally:
            call.cancel()
        if received != total:
            raise DaemonUnavailable(f"{self._address} sent {received} of {total} bytes of {name}")
        return await asyncio.to_thread(b"".join, parts)

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address.target, options=CHANNEL_OPTIONS)
