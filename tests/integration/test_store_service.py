"""Reading a store through its daemon: the same bytes as from the directory, and nothing but the store."""

from __future__ import annotations

import asyncio

import grpc.aio
import numpy as np
import pytest
from daemons import RECORD_BYTES, eventually, on_loop
from sessions import RawSession

from tierd.addresses import Address
from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.client import remote_store
from tierd.client.loop_thread import LoopThread
from tierd.client.remote_store import RemoteStore
from tierd.errors import DeadlineExceeded, LimitExceeded
from tierd.rpc import CHANNEL_OPTIONS, CHUNK_BYTES, read_safely
from tierd.service.store_service import StoreService
from tierd.store.checksums import xxh3
from tierd.store.store import ExpertStore
from tierd.store.synthetic import expected_record


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    return serve_module(pattern_store.path)


@pytest.fixture(scope="module")
def big_daemon(serve_module, big_records_store):
    return serve_module(big_records_store.path, "--arena", "100%")


def collect(address, method, request, seconds=20.0):
    """All messages of a server stream, or the status that ended it."""

    async def run():
        async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
            call = getattr(store_pb2_grpc.StoreServiceStub(channel), method)(request)
            messages = []
            try:
                while (message := await read_safely(call)) is not grpc.aio.EOF:
                    messages.append(message)
            except grpc.aio.AioRpcError as error:
                return messages, error.code().name, error.details()
            return messages, "OK", ""

    return on_loop(run(), seconds)


def test_a_remote_store_is_the_store_of_the_directory(daemon, pattern_store):
    remote = RemoteStore(daemon.address, LoopThread.shared())
    assert remote.manifest == pattern_store.manifest
    assert remote.fingerprint == pattern_store.fingerprint
    assert remote.tiers == ["ram", "nvme"]
    assert remote.arena_bytes == remote.slots * pattern_store.geometry.slot_bytes
    for file in pattern_store.manifest.files:
        assert remote.read_file(file.name) == pattern_store.read_file(file.name)
    assert pattern_store.manifest.files
    for name in ("a", "b"):
        ours, theirs = pattern_store.read_dense(name), remote.read_dense(name)
        assert theirs.data.dtype == ours.data.dtype
        assert np.array_equal(theirs.data, ours.data)
        assert theirs.data.ctypes.data % 64 == 0
    assert pattern_store.read_dense("a").data.nbytes > 2 * CHUNK_BYTES  # more than one chunk was put together


def test_a_real_model_arrives_whole(serve, embedded_store):
    here = ExpertStore.open(embedded_store)
    remote = RemoteStore(serve(embedded_store).address, LoopThread.shared())
    assert {file.name for file in here.manifest.files} >= {"config.json", "tokenizer.json"}
    for file in here.manifest.files:
        assert remote.read_file(file.name) == here.read_file(file.name)
    scales = {info.scales for info in here.manifest.dense}
    for info in here.manifest.dense[:4]:
        if info.name not in scales:
            assert np.array_equal(remote.read_dense(info.name).data, here.read_dense(info.name).data)


def test_a_large_tensor_has_the_time_that_it_takes_over_a_slow_link(daemon, pattern_store, monkeypatch):
    monkeypatch.setattr(remote_store, "_SECONDS", 0.0)
    remote = RemoteStore(daemon.address, LoopThread.shared())
    monkeypatch.setattr(remote_store, "_SLOWEST_LINK", 1e5)
    assert remote.read_dense("a").data.nbytes == pattern_store.read_dense("a").data.nbytes
    monkeypatch.setattr(remote_store, "_SLOWEST_LINK", 1e12)
    with pytest.raises(DeadlineExceeded):
        remote.read_dense("a")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "store.json", "experts-00001.safetensors", "", "a\0b", "x" * 4000]
)
def test_a_file_that_the_manifest_does_not_list_is_refused_on_both_sides(daemon, name):
    messages, code, detail = collect(daemon.address, "ReadFile", pb.ReadFileRequest(name=name))
    assert (messages, code) == ([], "INVALID_ARGUMENT")
    assert len(detail) < 8000
    with pytest.raises(LimitExceeded):
        RemoteStore(daemon.address, LoopThread.shared()).read_file(name)


def test_unknown_and_too_many_tensors_are_refused(daemon):
    _, code, detail = collect(daemon.address, "ReadDense", pb.ReadDenseRequest(names=["a", "nothing"]))
    assert code == "INVALID_ARGUMENT"
    assert "nothing" in detail
    messages, code, _ = collect(daemon.address, "ReadDense", pb.ReadDenseRequest(names=[""] * 70_000))
    assert (messages, code) == ([], "INVALID_ARGUMENT")
    with pytest.raises(LimitExceeded, match="nothing"):
        RemoteStore(daemon.address, LoopThread.shared()).read_dense("nothing")


@pytest.mark.parametrize("layer", range(len(RECORD_BYTES)), ids=[f"{size} bytes" for size in RECORD_BYTES])
def test_expert_bytes_arrive_in_chunks_in_the_order_asked_with_their_checksum(big_daemon, big_records_store, layer):
    order = [3, 0, 2]
    messages, code, _ = collect(big_daemon.address, "ReadExperts", pb.ReadExpertsRequest(layer=layer, experts=order))
    assert code == "OK"
    assert list(dict.fromkeys(message.expert for message in messages)) == order
    assert max(len(message.data) for message in messages) <= CHUNK_BYTES
    for expert in order:
        parts = [message for message in messages if message.expert == expert]
        data = b"".join(message.data for message in parts)
        assert data == expected_record(big_records_store.manifest, layer, expert)
        assert {(part.total_bytes, part.xxh3) for part in parts} == {(len(data), xxh3(data))}


def test_impossible_experts_are_refused(daemon):
    for request in (
        pb.ReadExpertsRequest(layer=4, experts=[0]),
        pb.ReadExpertsRequest(layer=2**31, experts=[0]),
        pb.ReadExpertsRequest(layer=0, experts=[16]),
        pb.ReadExpertsRequest(layer=0, experts=[0] * 65),
    ):
        messages, code, _ = collect(daemon.address, "ReadExperts", request)
        assert (messages, code) == ([], "INVALID_ARGUMENT")


def test_a_reader_waits_for_room_and_runs_into_its_deadline(serve, pattern_store):
    daemon = serve(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes)
    holder = RawSession(daemon.address)
    holder.hello()
    holder.acquire(0, [0, 1])
    holder.answers(2)
    request = pb.ReadExpertsRequest(layer=1, experts=[0], deadline_ms=50)
    messages, code, detail = collect(daemon.address, "ReadExperts", request)
    assert (messages, code) == ([], "DEADLINE_EXCEEDED")
    assert "room in the arena" in detail
    holder.close()
    messages, code, _ = collect(daemon.address, "ReadExperts", pb.ReadExpertsRequest(layer=1, experts=[0]))
    assert code == "OK"
    assert messages[0].data == expected_record(pattern_store.manifest, 1, 0)


def test_a_transfer_that_is_cancelled_after_its_first_chunk_leaves_no_grant(big_daemon):
    async def run():
        async with grpc.aio.insecure_channel(big_daemon.address.target, options=CHANNEL_OPTIONS) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            for _ in range(20):
                call = stub.ReadExperts(pb.ReadExpertsRequest(layer=2, experts=[0, 1, 2, 3]))
                assert (await read_safely(call)).data
                call.cancel()

    on_loop(run())
    counted = eventually(lambda: (s := big_daemon.stats())["arena"]["slots_granted"] == 0 and s)
    assert counted["requests"]["pending"] == 0
    asked = counted["requests"]
    assert asked["requests"] == asked["hits"] + asked["misses"] + asked["joined"] + asked["cancelled"]


def test_a_client_that_takes_nothing_gives_its_place_to_the_next(folder):
    """One stalled reader per place must not keep the store from everybody else."""

    class Store:
        def read_file(self, name):
            return name.encode() * (4 << 20)

    service = StoreService(
        Store(), None, boot_id="", tiers=[], slots=lambda: 1, default_deadline=1.0, stall_seconds=1.0
    )
    address = Address(path=folder / "x.sock")
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]

    async def run():
        server = grpc.aio.server()
        store_pb2_grpc.add_StoreServiceServicer_to_server(service, server)
        server.add_insecure_port(address.target)
        await server.start()
        async with grpc.aio.insecure_channel(address.target, options=[*CHANNEL_OPTIONS, *window]) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            stalled = [stub.ReadFile(pb.ReadFileRequest(name="s")) for _ in range(4)]
            for call in stalled:
                assert (await read_safely(call)).data
            call = stub.ReadFile(pb.ReadFileRequest(name="g"))
            received = 0
            while (message := await read_safely(call)) is not grpc.aio.EOF:
                received += len(message.data)
            codes = []
            for call in stalled:
                try:
                    while await read_safely(call) is not grpc.aio.EOF:
                        pass
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code().name)
        await asyncio.wait_for(server.stop(0), 60)
        return received, codes

    received, codes = on_loop(run())
    assert received == 4 << 20
    assert codes == ["DEADLINE_EXCEEDED"] * 4
