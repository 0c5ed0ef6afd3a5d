"""Strangers at a daemon that other hosts can reach: kept out, at no cost to those who belong there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import grpc.aio
import pytest
from daemons import eventually, on_loop
from far import Certificates, token_file, worker_here
from sessions import RawSession

from tierd.access import Access
from tierd.api import (
    admin_pb2,
    admin_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tierd.client.arena_source import ArenaSource
from tierd.client.loop_thread import LoopThread
from tierd.client.remote_store import RemoteStore
from tierd.client.source import Phase
from tierd.errors import AccessDenied, DaemonUnavailable, UsageError
from tierd.listening import Protection
from tierd.rpc import CHANNEL_OPTIONS, PROTOCOL, read_safely

TOKEN = "the-token-of-those-who-pay"


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    return token_file(folder / "right", TOKEN), token_file(folder / "wrong", "a-token-of-somebody-else")


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store, tls, secrets, tmp_path_factory):
    sockets = tmp_path_factory.mktemp("a")
    return serve_module(
        pattern_store.path, "--tls-cert", tls.certificate, "--tls-key", tls.key, "--token-file", secrets[0],
        "--local", f"unix:{sockets}/admin.sock", "--max-sessions", 8, "--arena", "25%", listen="127.0.0.1:0",
    )  # fmt: skip


@pytest.fixture
def access(tls, secrets):
    return Access(ca=tls.ca, token_file=secrets[0])


@pytest.fixture
def good_node(daemon, access):
    """A node that pays, and works all the while."""
    store = RemoteStore(daemon.address, LoopThread.shared(), access)
    source = ArenaSource(daemon.address, store, name="good", numerics="exact", kernel_path="none", access=access)
    stop, failures, visits = threading.Event(), [], [0]

    def work():
        try:
            while not stop.wait(0.005):
                source.visit(visits[0] % 4, [visits[0] % 15, 15], lambda *_: None, step=visits[0], phase=Phase.DECODE)
                visits[0] += 1
        except Exception as error:  # noqa: BLE001, reported below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: visits[0] or failures)
    yield visits
    before = visits[0]
    eventually(lambda: visits[0] > before or failures)
    stop.set()
    thread.join(60)
    source.close()
    assert not failures


def raw_channel(daemon, tls):
    credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes())
    return grpc.aio.secure_channel(daemon.address.target, credentials, options=CHANNEL_OPTIONS)


def calls_of(channel):
    """One call of every kind that the daemon offers to nodes, without credentials."""
    store, session = store_pb2_grpc.StoreServiceStub(channel), session_pb2_grpc.SessionServiceStub(channel)
    return {
        "Describe": lambda **how: store.Describe(store_pb2.DescribeRequest(), **how),
        "ReadFile": lambda **how: store.ReadFile(store_pb2.ReadFileRequest(name="config.json"), **how),
        "ReadIndex": lambda **how: store.ReadIndex(store_pb2.ReadIndexRequest(), **how),
        "ReadDense": lambda **how: store.ReadDense(store_pb2.ReadDenseRequest(names=["a"]), **how),
        "ReadExperts": lambda **how: store.ReadExperts(store_pb2.ReadExpertsRequest(layer=0, experts=[0]), **how),
        "OpenSession": session.OpenSession,
    }


async def status(call):
    """How a call of any kind ends."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            while await read_safely(call) is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()
    finally:
        call.cancel()
    return "OK", ""


@pytest.mark.usefixtures("good_node")
def test_without_the_token_every_call_is_refused(daemon, tls):
    wrong = (
        (), (("authorization", "Bearer a-token-of-somebody-else"),), (("authorization", TOKEN),),
        (("authorization", f"Bearer {TOKEN}x"),), (("authorization", "Bearer "),), (("x-token", TOKEN),),
    )  # fmt: skip

    async def run():
        codes = set()
        async with raw_channel(daemon, tls) as channel:
            for metadata in wrong:
                for call in calls_of(channel).values():
                    codes.add((await status(call(metadata=metadata, timeout=60)))[0])
            right = calls_of(channel)["Describe"](metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60)
            return codes, (await status(right))[0]

    assert on_loop(run()) == ({"UNAUTHENTICATED"}, "OK")
    assert len(daemon.stats()["sessions"]) == 1


def test_a_node_is_told_why_it_may_not_come_in(daemon, tls, secrets, tmp_path):
    loop = LoopThread.shared()
    for access, error in (
        (Access(ca=tls.ca), AccessDenied),
        (Access(ca=tls.ca, token_file=secrets[1]), AccessDenied),
        (Access(token_file=secrets[0]), DaemonUnavailable),  # plain text to TLS
        (Access(ca=Certificates(tmp_path, "other").ca, token_file=secrets[0]), DaemonUnavailable),
        (Access(ca=tmp_path / "nothing"), UsageError),
    ):
        with pytest.raises(error) as refused:
            RemoteStore(daemon.address, loop, access)
        assert TOKEN not in str(refused.value)
        assert error is not DaemonUnavailable or "--tls-ca" in refused.value.hint
    assert RemoteStore(daemon.address, loop, Access(ca=tls.ca, token_file=secrets[0])).slots == 16


def test_operators_calls_are_not_offered_to_nodes(daemon, tls):
    async def run():
        async with raw_channel(daemon, tls) as channel:
            drain = admin_pb2_grpc.AdminServiceStub(channel).Drain(
                admin_pb2.DrainRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60
            )
            reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            reflect = reflection(timeout=60)
            return (await status(drain))[0], (await status(reflect))[0]

    assert on_loop(run()) == ("UNIMPLEMENTED", "UNIMPLEMENTED")
    assert daemon.stats()["boot_id"]
    # Nodes of this host need neither token nor certificate there.
    assert RemoteStore(daemon.local, LoopThread.shared()).slots == 16


@pytest.mark.usefixtures("good_node")
def test_what_cannot_be_is_refused_in_bounded_memory(daemon, tls):
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    requests = [
        (store_pb2.ReadExpertsRequest(layer=0, experts=range(1_000_000)), "RESOURCE_EXHAUSTED"),
        (store_pb2.ReadExpertsRequest(layer=2**31, experts=[0]), "INVALID_ARGUMENT"),
        (store_pb2.ReadExpertsRequest(layer=2**32 - 1, experts=[0]), "INVALID_ARGUMENT"),
        (store_pb2.ReadExpertsRequest(layer=0, experts=[2**31]), "INVALID_ARGUMENT"),
        (store_pb2.ReadExpertsRequest(layer=0, experts=[0], fingerprint="x"), "FAILED_PRECONDITION"),
    ]

    async def run():
        async with raw_channel(daemon, tls) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            return [(await status(stub.ReadExperts(r, metadata=metadata, timeout=60)))[0] for r, _ in requests]

    on_loop(run())
    before = daemon.rss_bytes()
    for _ in range(3):
        assert on_loop(run()) == [code for _, code in requests]
    assert daemon.rss_bytes() - before < 8 << 20


def test_floods_of_strangers_cost_those_who_pay_nothing(daemon, tls, good_node):
    """Half-open connections, handshakes that never end, and sessions without a token."""
    descriptors, memory, answered = daemon.descriptors(), daemon.rss_bytes(), good_node[0]
    half_open = []
    for number in range(150):
        one = socket.create_connection((daemon.address.host, daemon.address.port))
        if number % 2:
            one.sendall(b"\x16\x03\x01\x02\x00" if number % 4 == 1 else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        half_open.append(one)

    async def flood():
        async with raw_channel(daemon, tls) as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)
            return {(await status(stub.OpenSession(timeout=60)))[0] for _ in range(300)}

    assert on_loop(flood(), seconds=60) == {"UNAUTHENTICATED"}
    eventually(lambda: good_node[0] > answered + 20)
    assert daemon.rss_bytes() - memory < 24 << 20
    assert not [line for line in daemon.log.splitlines() if line[:1] in "IWE" and "handshake" in line.lower()]
    for one in half_open:
        one.close()
    eventually(lambda: daemon.descriptors() <= descriptors + 4)
    assert len(daemon.stats()["sessions"]) == 1


@pytest.mark.usefixtures("good_node")
def test_floods_of_sessions_and_hints_from_inside_end_at_the_limit(daemon, tls):
    """They have the token, and no manners."""
    metadata = (("authorization", f"Bearer {TOKEN}"),)

    async def run():
        async with raw_channel(daemon, tls) as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)
            streams = [stub.OpenSession(metadata=metadata) for _ in range(20)]
            codes = []
            for stream in streams:
                await stream.write(session_pb2.OpenSessionRequest(hello=session_pb2.Hello(protocol=PROTOCOL, name="f")))
                try:
                    await read_safely(stream)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code().name)
            hint = session_pb2.Hint(layer=1, experts=range(2000))
            for _ in range(2000):
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await streams[0].write(session_pb2.OpenSessionRequest(hint=hint))
            for stream in streams:
                stream.cancel()
            return codes

    memory = daemon.rss_bytes()
    assert on_loop(run(), seconds=60) == ["INVALID_ARGUMENT"] * 13
    eventually(lambda: len(daemon.stats()["sessions"]) == 1)
    assert daemon.rss_bytes() - memory < 16 << 20


def test_certificates_and_tokens_are_renewed_without_a_restart(serve, pattern_store, tmp_path, folder):
    first = Certificates(tmp_path, "first")
    right = token_file(tmp_path / "tokens", "the-first-of-the-tokens")
    daemon = serve(
        pattern_store.path, "--tls-cert", first.certificate, "--tls-key", first.key, "--tls-client-ca", first.ca,
        "--token-file", right, "--local", f"unix:{folder}/a.sock", listen="127.0.0.1:0",
    )  # fmt: skip
    loop, (chain, key) = LoopThread.shared(), first.issue("client")

    def describe(ca=first.ca, chain=chain, key=key, tokens=right):
        return RemoteStore(daemon.address, loop, Access(ca=ca, certificate=chain, key=key, token_file=tokens))

    old = token_file(tmp_path / "old", "the-first-of-the-tokens")
    session = ArenaSource(
        daemon.address, describe(), name="old", numerics="exact", kernel_path="none",
        access=Access(ca=first.ca, certificate=chain, key=key, token_file=old),
    )  # fmt: skip
    with pytest.raises(DaemonUnavailable):  # it has no certificate of its own
        describe(chain=None, key=None)
    second = Certificates(tmp_path, "second")
    # Half of a renewal: the key does not fit the certificate, so the old ones hold.
    first.certificate.write_bytes(second.certificate.read_bytes())
    describe()
    first.key.write_bytes(second.key.read_bytes())
    first_ca = first.ca.read_bytes()
    first.ca.write_bytes(first_ca + second.ca.read_bytes())
    right.write_text("the-second-of-the-tokens\n")
    (tmp_path / "first-ca.pem").write_bytes(first_ca)
    with pytest.raises(DaemonUnavailable):
        describe(ca=tmp_path / "first-ca.pem")
    assert describe(ca=second.ca).slots
    with pytest.raises(AccessDenied):
        describe(ca=second.ca, tokens=old)
    right.write_text("short\n")  # it cannot be used, so the last tokens hold
    assert describe(ca=second.ca, tokens=token_file(tmp_path / "new", "the-second-of-the-tokens")).slots
    session.visit(0, [1, 2], lambda *_: None, step=1, phase=Phase.DECODE)  # it was let in before
    session.close()


def test_a_worker_keeps_strangers_out_and_refuses_what_cannot_be(embedded_store, tls, secrets):
    protection = Protection(certificate=tls.certificate, key=tls.key, token_file=secrets[0])
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    with worker_here(embedded_store, protection=protection) as worker:
        wide, chosen, own = worker._work.hidden, worker._work.top_k, worker._service._identity
        hello = worker_pb2.ComputeHello(
            protocol=PROTOCOL, fingerprint=own.fingerprint, numerics=own.numerics, kernel_path=own.kernel_path, name="n"
        )

        async def ends(messages, metadata=metadata):
            """How the stream ends, or what is not computed."""
            credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes())
            async with grpc.aio.secure_channel(worker.address.target, credentials, options=CHANNEL_OPTIONS) as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).Compute(metadata=metadata, timeout=60)
                try:
                    for message in messages:
                        await call.write(message)
                    while (answer := await read_safely(call)) is not grpc.aio.EOF:
                        if answer.WhichOneof("message") == "not_computed":
                            return answer.not_computed.detail
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                except asyncio.InvalidStateError:
                    return (await call.code()).name
                finally:
                    call.cancel()
            return "OK"

        def rows(**fields):
            whole = {"id": 1, "layer": 0, "rows": 1, "inputs": bytes(4 * wide), "experts": bytes(4 * chosen)}
            return worker_pb2.ComputeRequest(rows=worker_pb2.Rows(**whole | fields))

        said = worker_pb2.ComputeRequest(hello=hello)
        assert on_loop(ends([said], metadata=())) == "UNAUTHENTICATED"
        assert on_loop(ends([rows()])) == "FAILED_PRECONDITION"
        assert on_loop(ends([said, said])) == "FAILED_PRECONDITION"
        long = worker_pb2.ComputeRequest(hello=hello)
        long.hello.name = "n" * 65
        assert on_loop(ends([long])) == "INVALID_ARGUMENT"
        minus, large = (2**32 - 2).to_bytes(4, "little"), (2**31 - 1).to_bytes(4, "little")
        for fields, words in (
            ({"layer": 2**31}, "no routed experts"),
            ({"rows": 0}, "rows"),
            ({"rows": 2**31}, "rows"),
            ({"inputs": b"x"}, "bytes of activations"),
            ({"experts": b""}, "bytes of activations"),
            ({"experts": minus * chosen}, "experts of layer 0"),
            ({"experts": large * chosen}, "experts of layer 0"),
            ({"experts": b"\xff" * (4 * chosen)}, "wants no expert"),
            ({"rows": 65, "inputs": bytes(65 * 4 * wide), "experts": bytes(65 * 4 * chosen)}, "65 rows"),
        ):
            assert words in on_loop(ends([said, rows(**fields)])), fields
        nothing = {"inputs": bytes(4 * wide), "experts": bytes(4 * chosen)}
        many = [rows(id=number + 1, **nothing) for number in range(64)]
        compute = worker._work.compute
        worker._work.compute = lambda *given, **named: (time.sleep(0.2), compute(*given, **named))[1]
        assert on_loop(ends([said, *many])) in ("INVALID_ARGUMENT", "4 requests are unanswered already")
        eventually(lambda: not worker._service.nodes)


def test_a_session_over_plain_text_is_refused_by_a_daemon_with_certificates(daemon):
    raw = RawSession(daemon.address)
    raw.send(hello=session_pb2.Hello(protocol=PROTOCOL))
    assert raw.status()[0].name == "UNAVAILABLE"
    raw.close()
    assert "andshake" not in daemon.log  # lines of gRPC's own among the daemon's
