"""Bad links between a far node and its store: cut, stalled, slow; and workers that die or dawdle."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from daemons import eventually
from far import WorkerProcess, daemon, far_model, open_far, own_cache, tokens, worker_here

from compute_node.bench.delay_proxy import DelayProxy
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable, SessionRefused, TierdError

__all__ = ["daemon", "own_cache"]

COUNT = 8


@pytest.fixture
def expected(reference):
    return reference["token_ids"][:COUNT]


@contextlib.contextmanager
def link_to(address, delay=0.0):
    proxy = DelayProxy(address, delay=delay)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def meanwhile(work):
    """Something else that happens again and again."""
    stop = threading.Event()

    def run():
        while not stop.wait(0.05):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def test_bytes_over_a_link_that_is_cut_again_and_again_are_right(daemon, expected):
    told = []
    with link_to(daemon.address) as proxy, far_model(open_far(proxy.address, arena="10%", told=told)) as generator:
        chance = random.Random(1)

        def cut():
            if chance.random() < 0.3:
                proxy.cut()

        with meanwhile(cut):
            assert tokens(generator, COUNT) == expected
        proxy.cut()
        assert tokens(generator, COUNT) == expected
    assert generator.model.source.stats.requested == sum(generator.model.source.stats.outcomes.values())


def test_a_link_that_stays_cut_is_one_clear_error_within_the_bound(daemon):
    with link_to(daemon.address) as proxy:
        told = []
        with far_model(open_far(proxy.address, arena="10%", patience=0.5, told=told)) as generator:
            proxy.cut(refuse=True)
            with pytest.raises(DaemonUnavailable, match=r"did not come back within 0\.5 s"):
                tokens(generator, COUNT)
        assert "went away" in told[0]


def test_a_daemon_that_comes_back_with_another_store_is_refused(serve, embedded_store, pattern_store):
    daemon = serve(embedded_store, listen="127.0.0.1:0")
    with far_model(open_far(daemon.address, arena="10%")) as generator:
        daemon.stop()
        daemon.listen, daemon.store = str(daemon.address), pattern_store.path
        daemon.start()
        with pytest.raises(SessionRefused, match=pattern_store.fingerprint[:12]):
            tokens(generator, COUNT)


def test_workers_behind_links_that_stall_and_break_are_replaced(daemon, embedded_store, expected):
    """One is never heard of again, one is cut off again and again, and what neither does comes as bytes."""
    told = []
    with (
        worker_here(embedded_store) as first,
        worker_here(embedded_store) as second,
        link_to(first.address) as lame,
        link_to(second.address, delay=0.004) as shaky,
    ):
        source = open_far(
            daemon.name, experts="worker", workers=(str(lame.address), str(shaky.address)), worker_seconds=30.0,
            told=told,
        )  # fmt: skip

        def reorder():
            lame.delay, shaky.delay = shaky.delay, lame.delay

        with far_model(source) as generator:
            with meanwhile(reorder):  # answers come in another order than they were asked for
                assert tokens(generator, COUNT) == expected
            assert set(source.stats.tiers) == {"worker"}
            # Now that nobody is to be late by chance: so little patience only for the one that will not answer.
            source._patience = 0.3
            lame.stall()
            assert tokens(generator, 4, "He said that") == tokens(generator, 4, "He said that")
            assert any("did not answer within 0.3 s" in line for line in told)
            with meanwhile(shaky.cut):
                assert tokens(generator, COUNT) == expected
            assert set(source.stats.tiers) > {"worker"}
            assert source.stats.requested == sum(source.stats.outcomes.values())
            lame.stall(stalled=False)


def test_a_worker_that_is_killed_costs_no_token_and_is_used_again_when_it_is_back(daemon, expected, folder):
    """A process of its own, which reads the experts in the daemon's memory."""
    told = []
    worker = WorkerProcess(daemon.name, "--patience", "5", folder=folder)
    try:
        source = open_far(daemon.name, experts="worker", workers=(str(worker.address),), told=told)
        calls, compute = [0], source.compute

        def counted(*given, **named):
            calls[0] += 1
            if calls[0] == 20:
                worker.kill()
            return compute(*given, **named)

        source.compute = counted
        with far_model(source) as generator:
            assert tokens(generator, COUNT) == expected
            assert any("others do its work" in line for line in told)
            assert source.stats.tiers.keys() > {"worker"}
            worker.start()
            eventually(lambda: source._links[0].welcome is not None)
            before = source.stats.tiers["worker"]
            assert tokens(generator, COUNT) == expected
            assert source.stats.tiers["worker"] > before
        assert worker.stop() == 0
    finally:
        worker.kill()


def test_a_worker_that_leaves_between_two_layers_is_told_and_is_asked_when_it_is_back(daemon, embedded_store):
    told = []
    with worker_here(embedded_store) as worker:
        source = open_far(daemon.name, experts="worker", workers=(str(worker.address),), told=told)
        here = worker.address
    wide = source.store.manifest.geometry.hidden_size
    experts, inputs = np.array([[0, 1, 2, 3]], np.int32), np.ones((1, wide), np.float32)

    def left():
        outputs = np.empty((1, 4, wide), np.float32)
        return source.compute(0, experts, inputs, outputs, step=1, phase=Phase.DECODE)

    def back():
        return source._links[0].welcome is not None

    with closing(source):
        eventually(lambda: not source._answers.empty())
        assert left() == [0, 1, 2, 3]
        assert len([line for line in told if "others do its work" in line]) == 1
        with worker_here(embedded_store, listen=here):
            eventually(back)
            assert left() == []
        eventually(lambda: not source._answers.empty())
        with worker_here(embedded_store, listen=here):  # nothing was asked while it was away
            eventually(back)
            assert left() == []
        assert len([line for line in told if "others do its work" in line]) == 2


def _trouble(stop, chance, daemon, workers, proxies):
    """One misfortune after the other."""
    while not stop.wait(chance.uniform(0.1, 2.0)):
        proxy = chance.choice(proxies)
        match chance.randrange(6):
            case 0:
                proxy.cut()
            case 1:
                proxy.stall()
                stop.wait(chance.uniform(0.1, 1.5))
                proxy.stall(stalled=False)
            case 2:
                proxy.delay = chance.choice((0.0, 0.001, 0.05))
            case 3:
                daemon.kill()
                daemon.start()
            case _:
                worker = chance.choice(workers)
                worker.kill()
                worker.start()


@pytest.mark.soak
def test_two_minutes_of_everything_at_once(serve, embedded_store, reference, folder):
    """Daemon and worker killed and restarted, links cut, stalled and slow, at random."""
    expected, chance = reference["token_ids"][:24], random.Random()
    daemon = serve(embedded_store, "--arena", "25%", listen="127.0.0.1:0")
    daemon.listen = str(daemon.address)
    workers = [WorkerProcess(daemon.listen, "--patience", "20", folder=folder) for _ in range(2)]
    proxies = [DelayProxy(address) for address in (daemon.address, *(worker.address for worker in workers))]
    until, done, errors = time.monotonic() + 120, 0, []
    stop = threading.Event()

    thread = threading.Thread(target=_trouble, args=(stop, chance, daemon, workers, proxies))
    thread.start()
    try:
        while time.monotonic() < until:
            how = chance.choice((
                {"arena": "10%"},
                {"experts": "worker", "workers": tuple(str(p.address) for p in proxies[1:]), "worker_seconds": 0.5},
            ))  # fmt: skip
            try:
                with far_model(open_far(proxies[0].address, patience=chance.choice((1.0, 30.0)), **how)) as generator:
                    for _ in range(3):
                        assert tokens(generator, 24) == expected
                        done += 1
            except TierdError as error:
                errors.append(error)
    finally:
        stop.set()
        thread.join(60)
        for worker in workers:
            worker.kill()
        for proxy in proxies:
            proxy.close()
    print(f"{done} right answers, {len(errors)} clear errors: {sorted({type(error).__name__ for error in errors})}")
    assert done > 10, errors
    assert all(error.message for error in errors)
