"""A store seen through its daemon: manifest, text files and dense weights, checked on arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from tierd.access import LOCAL_ACCESS, Access
from tierd.addresses import Address
from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.client.idle_channel import IdleChannel
from tierd.client.loop_thread import LoopThread
from tierd.client.store_cache import StoreCache
from tierd.errors import (
    ChecksumMismatch,
    DaemonUnavailable,
    DeadlineExceeded,
    LimitExceeded,
    SessionRefused,
    StoreDamaged,
)
from tierd.rpc import PROTOCOL, error_of, read_safely
from tierd.store.checksums import sha256, xxh3
from tierd.store.index import check_index, decode_index
from tierd.store.manifest import Manifest, StoredFile, parse_manifest
from tierd.store.store import DenseTensor

__all__ = ["RemoteStore"]

_PARTS = (pb.ReadFileResponse, pb.ReadIndexResponse, pb.ReadDenseResponse)
_Begin: TypeAlias = Callable[..., Any]
"""Begins a call at a `StoreServiceStub`, with a timeout and metadata."""

_SECONDS = 120.0
_SLOWEST_LINK = 1e6
"""Bytes per second: what takes longer than at this rate, and `_SECONDS` more, is given up."""
_SILENT_SECONDS = 60.0
"""Between two chunks; before the first one the daemon reads from its drives, behind others' reads."""
_CONNECT_SECONDS = 10.0
_DTYPES = {"f32": "<f4", "bf16": "<u2", "i8": "i1", "fp8": "u1", "i64": "<i8", "i32": "<i4", "u8": "u1"}


class RemoteStore:
    """What a node needs beside the experts, read over gRPC once at start.

    Args:
        address: the daemon.
        loop: the process's gRPC loop.
        access: how to reach it.
        cache: makes, for a fingerprint, the place where this host keeps what it has fetched; None keeps nothing.

    Raises:
        DaemonUnavailable: nobody answers.
        AccessDenied: the daemon wants another token.
        SessionRefused: it speaks another protocol.
        StoreDamaged: what it says of its store does not hold together.
    """

    def __init__(
        self,
        address: Address,
        loop: LoopThread,
        access: Access = LOCAL_ACCESS,
        cache: Callable[[str], StoreCache] | None = None,
    ) -> None:
        self._address = address
        self._loop = loop
        self._access = access
        self._channel = IdleChannel(lambda: access.channel(address))
        described = self._described()
        if described.protocol != PROTOCOL:
            raise SessionRefused(f"{address} speaks protocol {described.protocol}, this node {PROTOCOL}")
        self.manifest: Manifest = parse_manifest(described.manifest, str(address))
        self.fingerprint: str = self.manifest.fingerprint
        self.tiers = list(described.tiers)
        self.slots = int(described.slots)
        self.arena_bytes = int(described.arena_bytes)
        self._dense = {info.name: info for info in self.manifest.dense}
        self._files = {file.name: file for file in self.manifest.files}
        self._cache = None if cache is None else cache(self.fingerprint)
        self._checksums: NDArray[np.uint64] | None = None

    def __repr__(self) -> str:
        return f"<RemoteStore {self._address} {self.fingerprint[:12]}>"

    def read_file(self, name: str) -> bytes:
        """A text file of the store; LimitExceeded if the manifest does not list it."""
        file = self._files.get(name)
        if file is None:
            raise LimitExceeded(f"{self._address}: the store has no file {name!r}")
        return self._checked(file, lambda stub, **terms: stub.ReadFile(pb.ReadFileRequest(name=name), **terms))

    def checksum(self, flat: int) -> int:
        """The xxh3-64 of an expert's record, from the store's index, which the fingerprint covers."""
        if self._checksums is None:
            index = self.manifest.index
            data = self._checked(index, lambda stub, **terms: stub.ReadIndex(pb.ReadIndexRequest(), **terms))
            rows = decode_index(data, self.manifest.geometry, f"the index of {self._address}")
            check_index(rows, self.manifest.geometry, self.manifest.shards, f"the index of {self._address}")
            self._checksums = np.ascontiguousarray(rows["xxh3"])
        return int(self._checksums[flat])

    def check_still_there(self) -> None:
        """Ask the daemon whether it still serves this store.

        Raises:
            DaemonUnavailable: nobody answers.
            SessionRefused: it serves another one.
        """
        described = self._described()
        if described.fingerprint != self.fingerprint:
            raise SessionRefused(
                f"{self._address} serves store {described.fingerprint[:12]} now; this node computes with "
                f"{self.fingerprint[:12]}",
                hint="Start the node again.",
            )

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
        expected = int(info.xxh3, 16)
        aligned = None if self._cache is None else self._cache.read(info.xxh3, info.nbytes)
        if aligned is None or xxh3(aligned) != expected:
            request = pb.ReadDenseRequest(names=[name])
            data = self._read(name, lambda stub, **terms: stub.ReadDense(request, **terms), info.nbytes)
            if xxh3(data) != expected:
                raise ChecksumMismatch(f"{name} came damaged from {self._address}", length=info.nbytes)
            whole = np.empty(info.nbytes + 64, np.uint8)
            start = -whole.ctypes.data % 64
            aligned = whole[start : start + info.nbytes]
            aligned[:] = np.frombuffer(data, np.uint8)
            if self._cache is not None:
                self._cache.keep(info.xxh3, aligned)
        return aligned.view(_DTYPES[info.dtype]).reshape(info.shape)

    def _checked(self, file: StoredFile, begin: _Begin) -> bytes:
        """A small file, from this host or from the daemon; StoreDamaged if it is not the one of the manifest."""
        kept = None if self._cache is None else self._cache.read(file.sha256, file.bytes)
        if kept is not None and sha256(kept.tobytes()) == file.sha256:
            return kept.tobytes()
        data = self._read(file.name, begin, file.bytes)
        if sha256(data) != file.sha256:
            raise StoreDamaged(f"{file.name} came damaged from {self._address}")
        if self._cache is not None:
            self._cache.keep(file.sha256, data)
        return data

    def _terms(self, seconds: float) -> dict[str, Any]:
        return {"timeout": seconds, "metadata": self._access.metadata(self._address)}

    def _described(self) -> pb.DescribeResponse:
        what = f"describing {self._address}"
        return self._loop.run(self._describe(), seconds=_CONNECT_SECONDS + 5, what=what)

    async def _describe(self) -> pb.DescribeResponse:
        async with self._access.channel(self._address) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            try:
                return await stub.Describe(pb.DescribeRequest(), **self._terms(_CONNECT_SECONDS))
            except grpc.aio.AioRpcError as error:
                raise error_of(error, str(self._address)) from error

    def _read(self, name: str, begin: _Begin, nbytes: int) -> bytes:
        what, seconds = f"reading {name} from {self._address}", _SECONDS + nbytes / _SLOWEST_LINK
        return self._loop.run(self._reading(name, begin, nbytes, seconds), seconds=seconds, what=what)

    async def _reading(self, name: str, begin: _Begin, nbytes: int, seconds: float) -> bytes:
        async with self._channel.use() as channel:
            call = begin(store_pb2_grpc.StoreServiceStub(channel), **self._terms(seconds))
            return await self._collect(call, name, nbytes)

    async def _collect(
        self,
        call: Any,  # a call of one of the three; the stubs' call types are invariant in the request
        name: str,
        nbytes: int,
    ) -> bytes:
        parts: list[bytes] = []
        received = 0
        try:
            while True:
                async with asyncio.timeout(_SILENT_SECONDS):
                    message = await read_safely(call)
                if not isinstance(message, _PARTS):
                    break
                received += len(message.data)
                if message.total_bytes != nbytes or received > nbytes:
                    raise StoreDamaged(
                        f"{self._address} sends {message.total_bytes} bytes of {name}; the manifest says {nbytes}"
                    )
                parts.append(message.data)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._address} sent nothing of {name} for {_SILENT_SECONDS:g} s, after {received} of {nbytes} bytes"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(self._address)) from error
        finally:
            call.cancel()
        if received != nbytes:
            raise DaemonUnavailable(f"{self._address} sent {received} of {nbytes} bytes of {name}")
        return await asyncio.to_thread(b"".join, parts)
