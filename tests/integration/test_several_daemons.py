"""One name for several daemons or workers: gRPC resolves it and spreads the calls, and one's death goes unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
from daemons import eventually
from far import Certificates, daemon, open_far, own_cache, token_file, worker_here

from tierd.access import Access
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable, UsageError
from tierd.store.store import ExpertStore

__all__ = ["daemon", "own_cache"]


def ask(source, layer, experts):
    """Have experts brought; each must come once. That they are the right bytes the source checks itself."""
    came = []
    source.visit(layer, experts, lambda expert, _address: came.append(expert), step=0, phase=Phase.DECODE)
    assert sorted(came) == experts


def asked_of(daemon):
    return daemon.stats()["requests"]["requests"]


def test_calls_are_spread_over_daemons_and_go_on_when_one_dies(serve, daemon, embedded_store):
    other = serve(embedded_store, "--arena", "25%", listen="127.0.0.1:0")
    told, before, layers = [], asked_of(daemon), iter(range(8))
    source = open_far(f"ipv4:{daemon.name},{other.name}", arena="100%", told=told)
    try:

        def both_asked():
            ask(source, next(layers), list(range(16)))
            return min(asked_of(daemon) - before, asked_of(other))

        # The first calls go to whichever is connected first.
        eventually(both_asked)
        other.kill()
        first = asked_of(daemon)
        ask(source, 7, list(range(16, 32)))
        assert asked_of(daemon) - first == 16
    finally:
        source.close()
    # What was on its way from the killed one may have been asked for again: with a word, without an error.
    assert len(told) <= 3, told


def test_a_name_is_resolved_by_grpc(daemon):
    source = open_far(f"dns:///localhost:{daemon.address.port}", arena="10%")
    ask(source, 0, [1, 2, 3])
    source.close()
    with pytest.raises(DaemonUnavailable):
        open_far("dns:///no-such-host.invalid:1")


def test_a_list_of_numbers_is_held_to_the_name_in_its_certificates(serve, embedded_store, tmp_path):
    tls, token = Certificates(tmp_path), token_file(tmp_path / "token")
    chain, key = tls.issue("fleet", "stores.example")
    daemon = serve(
        embedded_store, "--tls-cert", chain, "--tls-key", key, "--token-file", token,
        "--local", f"unix:{tmp_path}/l.sock", listen="127.0.0.1:0",
    )  # fmt: skip
    several = f"ipv4:{daemon.name},{daemon.name}"
    source = open_far(several, access=Access(ca=tls.ca, token_file=token, name="stores.example"))
    ask(source, 0, [1, 2, 3])
    source.close()
    for name in ("", "others.example"):
        with pytest.raises(DaemonUnavailable):
            open_far(several, access=Access(ca=tls.ca, token_file=token, name=name))


def test_the_memory_of_several_daemons_is_not_one(daemon):
    with pytest.raises(UsageError, match="one daemon"):
        open_far(f"ipv4:{daemon.name},{daemon.name}", experts="arena")


def compute(source, layer):
    """The rows that workers compute for one token; whether they all came from workers."""
    geometry = source.store.manifest.geometry
    numbers = np.arange(geometry.top_k, dtype=np.int32)[None, :]
    inputs = np.full((1, geometry.hidden_size), 0.25, np.float32)
    outputs = np.zeros((1, geometry.top_k, geometry.hidden_size), np.float32)
    left = source.compute(layer, numbers, inputs, outputs, step=0, phase=Phase.DECODE)
    return outputs.tobytes(), not left


def test_the_worker_behind_a_name_may_be_another_one_next_time(daemon, embedded_store):
    layer = ExpertStore.open(embedded_store).geometry.layers[0].layer
    told = []
    with worker_here(embedded_store) as lasting:
        with worker_here(embedded_store) as leaving:
            several = f"ipv4:{leaving.address},{lasting.address}"
            source = open_far(daemon.name, experts="worker", workers=(several,), told=told)
            rows = compute(source, layer)
            assert rows[1]
        assert len(lasting._service.nodes) <= 1
        eventually(lambda: compute(source, layer)[1])
        assert compute(source, layer) == rows
        assert len(lasting._service.nodes) == 1
        source.close()


def test_a_worker_may_move_if_a_file_says_where_to(daemon, embedded_store, tmp_path):
    layer = ExpertStore.open(embedded_store).geometry.layers[0].layer
    file = tmp_path / "worker-a"
    with worker_here(embedded_store) as first:
        file.write_text(str(first.address))
        source = open_far(daemon.name, experts="worker", workers=(f"@{file}=2",))
        rows = compute(source, layer)
        assert rows[1]
    file.unlink()
    assert not compute(source, layer)[1]
    with worker_here(embedded_store) as second:
        assert second.address != first.address
        file.write_text(str(second.address))
        eventually(lambda: compute(source, layer)[1], 20)
        assert compute(source, layer) == rows
        source.close()
