"""Where a daemon listens: on this host, or beyond it with protection, or where somebody said aloud that it may."""

from __future__ import annotations

import fcntl
import os

import grpc.aio
import pytest
from daemons import command, on_loop
from far import Certificates, token_file
from starlette.applications import Starlette

from tierd.addresses import Address
from tierd.client.loop_thread import LoopThread
from tierd.client.remote_store import RemoteStore
from tierd.errors import UsageError
from tierd.http_server import HttpServer, listen
from tierd.listening import _lock
from tierd.rpc import CHANNEL_OPTIONS, read_safely
from tierd.service.servers import Servers
from tierd.settings import ServeSettings


@pytest.mark.parametrize(
    ("listen", "options", "words"),
    [
        ("0.0.0.0:0", {}, ["--tls-cert", "--token-file", "--insecure"]),
        ("0.0.0.0:0", {"tls_cert": "certificate", "tls_key": "key"}, ["--token-file"]),
        ("[::]:0", {"token_file": "token"}, ["--tls-cert"]),
        ("example.org:0", {"tls_cert": "certificate", "token_file": "token"}, ["--tls-key"]),
        ("127.0.0.1:0", {"tls_cert": "certificate", "tls_key": "token"}, ["--tls-key", "PEM"]),
        ("127.0.0.1:0", {"tls_cert": "certificate", "tls_key": "other"}, ["cannot be used together"]),
        ("127.0.0.1:0", {"token_file": "nothing"}, ["--token-file", "cannot be read"]),
        ("unix:x.sock", {"token_file": "token"}, ["HOST:PORT"]),
        ("127.0.0.1:0", {"local": "127.0.0.1:0"}, ["--local", "unix:PATH"]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_an_address_that_others_reach_is_refused_without_protection(tmp_path, listen, options, words):
    tls, token = Certificates(tmp_path), token_file(tmp_path / "token")
    facts = {"certificate": tls.certificate, "key": tls.key, "token": token, "nothing": tmp_path / "nothing"}
    facts["other"] = tls.issue("another")[1]
    given = {name: facts.get(value, value) for name, value in options.items()}
    with pytest.raises(UsageError) as refused:
        Servers(tmp_path, ServeSettings(listen=listen, **given))
    for word in words:
        assert word in str(refused.value)


def test_a_refused_address_ends_the_command_with_advice(pattern_store):
    refused = command("tierd", "serve", pattern_store.path, "--listen", "0.0.0.0:0", "--http", "off")
    assert refused.returncode == 2
    assert "--insecure" in refused.stderr


def test_a_lock_that_its_daemon_removed_is_made_anew(folder, monkeypatch):
    path = folder / "a.sock"
    first, name = _lock(path), folder / "a.sock.lock"
    lock_file = fcntl.flock

    def locked_too_late(lock, operation):
        # The daemon that had it ends between opening and locking.
        monkeypatch.setattr(fcntl, "flock", lock_file)
        name.unlink()
        os.close(first)
        lock_file(lock, operation)

    monkeypatch.setattr(fcntl, "flock", locked_too_late)
    second = _lock(path)
    assert os.path.samestat(os.fstat(second), name.stat())
    with pytest.raises(UsageError, match="another daemon"):
        _lock(path)
    os.close(second)


def test_insecure_said_aloud_listens_and_reflection_answers_where_it_is_wanted(serve, pattern_store, folder):
    daemon = serve(
        pattern_store.path, "--insecure", "--reflection", "--local", f"unix:{folder}/a.sock", listen="0.0.0.0:0"
    )
    here = Address(host="127.0.0.1", port=daemon.address.port)
    assert RemoteStore(here, LoopThread.shared()).slots
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: PLC0415

    async def names(address):
        async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=60)
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await read_safely(call)
            call.cancel()
            return {service.name.rpartition(".")[2] for service in answer.list_services_response.service}

    assert on_loop(names(here)) == {"SessionService", "StoreService", "ServerReflection"}
    assert on_loop(names(daemon.local)) == {"AdminService", "SessionService", "StoreService", "ServerReflection"}


def test_a_server_of_http_has_all_that_it_needs_before_it_begins():
    address = Address(host="127.0.0.1", port=0)
    server = HttpServer(Starlette(), listen(address, hint=""), address)
    assert server._server.config.loaded
    server.close()
