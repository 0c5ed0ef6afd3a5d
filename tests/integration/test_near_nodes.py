"""Nodes on one host: they take turns at the drives, and share no more of the filesystem than the socket's directory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import grpc.aio
import pytest
from daemons import PROMPT, Daemon, on_loop
from rigs import plan_file

from tierd.api import session_pb2 as pb
from tierd.api import session_pb2_grpc
from tierd.rpc import CHANNEL_OPTIONS, PROTOCOL, read_safely

PRIVATE = 'mount -t tmpfs none "$1" && cp -r "$2" "$1/store" && shift 2 && exec "$@"'
HIDDEN = 'mount -t tmpfs none "$1" && shift && exec "$@"'


def test_a_prefill_of_one_node_does_not_stall_the_token_of_another(serve, pattern_store, tmp_path):
    """The drive reads one record after the other, slowly, and the order of what comes is looked at."""
    slow = plan_file(tmp_path / "plan.json", throttles=[{"bytes_per_second": 16384 * 20}])
    daemon = serve(
        pattern_store.path, "--arena", "100%", "--drive-threads", 1, "--fault-plan", slow, "--history", "off"
    )

    begun = asyncio.Event()

    async def opened(channel, name):
        call = session_pb2_grpc.SessionServiceStub(channel).OpenSession()
        await call.write(pb.OpenSessionRequest(hello=pb.Hello(protocol=PROTOCOL, name=name)))
        await read_safely(call)
        return call

    async def ask(call, layer, experts, phase, came):
        await call.write(pb.OpenSessionRequest(acquire=pb.Acquire(id=1, layer=layer, experts=experts, phase=phase)))
        while sum(origin == layer for origin in came) < len(experts):
            notice = (await read_safely(call)).notice
            came += [layer] * len(notice.ready)
            begun.set()

    async def run():
        came = []
        async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
            # All are there before anybody asks: how long it takes to come in has no say in the order.
            _idle, first, second = calls = [await opened(channel, name) for name in ("idle", "first", "second")]
            prefill = asyncio.ensure_future(ask(first, 0, range(16), pb.PHASE_PREFILL, came))
            await begun.wait()
            await ask(second, 1, [3, 4], pb.PHASE_DECODE, came)
            before = len(came) - 2
            await prefill
            for call in calls:
                call.cancel()
        return before, came

    before, came = on_loop(run(), seconds=60)
    assert sorted(came) == [0] * 16 + [1] * 2
    assert before < 12, "the token had to wait for most of the prefill"


def test_daemon_and_node_in_mount_namespaces_of_their_own_share_only_the_sockets_directory(
    folder, embedded_store, reference, tmp_path
):
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    tried = subprocess.run([*words, "mount -t tmpfs none /mnt"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.strip()}")
    private, shared = tmp_path / "private", folder / "shared"
    private.mkdir()
    shared.mkdir(mode=0o700)
    daemon = Daemon(private / "store", "--arena", "25%", folder=folder, listen=f"unix:{shared}/d.sock")
    daemon.launch([*words, PRIVATE, "sh", private, embedded_store, sys.executable, "-m", "tierd"])
    try:
        daemon.wait_until_up()
        assert not list(private.iterdir()), "the daemon's store is to be seen in its own namespace only"
        node = [sys.executable, "-m", "compute_node", "generate", daemon.name, "-p", PROMPT, "--json"]
        done = subprocess.run(
            [*words, HIDDEN, "sh", embedded_store, *node, "--max-tokens", "8", "--ignore-eos"],
            capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["token_ids"] == reference["token_ids"][:8]
        assert said["arena_slots"] == 64
    finally:
        assert daemon.stop() == 0, daemon.log
