"""Requests that are given up, late, refused or broken: their places are free at once, and others never notice."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from compute_node.engine.generate import FinishReason, GenerationParams, Generator
from compute_node.engine.model import Model, ModelOptions
from compute_node.serving.engine import Engine
from compute_node.serving.pace import Pace
from compute_node.serving.requests import Done, QueueFull, Request, Token
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable, DriveError
from tierd.store.store import ExpertStore

ORACLE = Path(__file__).parents[1] / "oracles" / "qwen3_moe"
CONTEXT = 128


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "store"
    convert(ORACLE, path, experts="int4-g64", dense="bf16")
    return ExpertStore.open(path)


class Gate(InProcess):
    """A source whose visits stop where `hold` says so until they are let go, and break where `broken` does."""

    direct = None  # so that each layer comes through `visit`

    def __init__(self, store):
        super().__init__(store)
        self.hold = self.broken = None
        self.held, self.let_go = queue.SimpleQueue(), threading.Event()
        self.visited = []

    def visit(self, layer, experts, use, *, step, phase, meanwhile=None):
        self.visited.append((layer, set(experts)))
        if self.hold is not None and self.hold(layer, phase):
            self.held.put(layer)
            assert self.let_go.wait(60)
        if self.broken is not None:
            self.broken(layer, experts)
        super().visit(layer, experts, use, step=step, phase=phase, meanwhile=meanwhile)


class Rig:
    """An engine over a gate, and what its requests hear."""

    def __init__(self, store, *, clock=None, sequences=4, **how):
        self.source = Gate(store)
        self.model = Model(self.source, ModelOptions(context=CONTEXT, sequences=sequences, rows=8, threads=1))
        given = {} if clock is None else {"clock": clock}
        self.engine = Engine(self.model, None, **({"max_running": sequences, "max_waiting": 8} | how | given))
        self.events, self.done = {}, queue.SimpleQueue()

    def submit(self, key, prompt=(5, 9, 2), *, max_tokens=4, **how):
        self.events[key] = []

        def hear(events):
            self.events[key] += events
            if isinstance(events[-1], Done):
                self.done.put(key)

        params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)
        return self.engine.submit(Request(prompt=tuple(prompt), params=params, **how), hear)

    def wait(self, *keys):
        assert {self.done.get(timeout=60) for _ in keys} == set(keys)

    def reason(self, key):
        assert isinstance(self.events[key][-1], Done)
        return self.events[key][-1].reason

    def tokens(self, key):
        return [event.token for event in self.events[key] if isinstance(event, Token)]

    def until_held(self):
        return self.source.held.get(timeout=60)

    def let_go(self):
        self.source.hold = None
        self.source.let_go.set()


@pytest.fixture
def rig(store):
    rigs = []

    def make(**how):
        rigs.append(Rig(store, **how))
        return rigs[-1]

    yield make
    for made in rigs:
        made.let_go()
        made.engine.close()
        stats = made.engine.stats()
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
        assert stats.requests == sum(stats.finished.values())
        assert made.model.cache.open_places == made.model.cache.sequences
        made.model.close()


def alone(store, prompt, *, max_tokens=4):
    with Model(InProcess(store), ModelOptions(context=CONTEXT, threads=1)) as model:
        params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)
        return list(list(Generator(model, None).generate(list(prompt), params))[-1].token_ids)


def at_the_first_layer(wanted):
    return lambda layer, phase: layer == 1 and phase is wanted  # layer 0 is dense


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_cancelled_request_ends_at_the_next_layer(rig, phase):
    here = rig()
    here.source.hold = at_the_first_layer(phase)
    ticket = here.submit("gone", range(30))
    here.until_held()
    visits = len(here.source.visited)
    ticket.cancel()
    ticket.cancel()
    # The place is free before anything else happens.
    assert here.engine.stats().running == 0
    here.let_go()
    here.wait("gone")
    assert here.reason("gone") is FinishReason.CANCELLED
    assert len(here.tokens("gone")) == (1 if phase is Phase.DECODE else 0)
    assert len(here.source.visited) == visits
    ticket.cancel()


def test_a_request_that_waits_leaves_the_queue_at_once(rig):
    here = rig(sequences=1, max_waiting=1)
    here.source.hold = at_the_first_layer(Phase.PREFILL)
    here.submit("runs")
    here.until_held()
    waits = here.submit("waits")
    with pytest.raises(QueueFull, match="1 requests run and 1 wait") as refused:
        here.submit("refused")
    assert refused.value.retry_after_seconds >= 1
    waits.cancel()
    assert here.engine.stats().waiting == 0
    here.submit("comes")
    here.let_go()
    here.wait("waits", "runs", "comes")
    assert here.reason("waits") is FinishReason.CANCELLED
    assert {here.reason(key) for key in ("runs", "comes")} == {FinishReason.LENGTH}
    assert here.engine.stats().refused == 1


def test_a_request_that_leaves_a_crowd_costs_no_more_reads_and_changes_no_token(rig, store):
    here = rig()
    prompts = {"stays": (5, 9, 2), "leaves": (70, 71, 72, 73)}
    here.source.hold = at_the_first_layer(Phase.DECODE)
    routes = []
    forward = here.model.forward

    def watched(tokens, positions, sequences, **how):
        routes.append(len(tokens))
        return forward(tokens, positions, sequences, **how)

    here.model.forward = watched
    tickets = {key: here.submit(key, prompt, max_tokens=6) for key, prompt in prompts.items()}
    while here.until_held() != 1 or routes[-1] < 2:
        here.source.let_go.set()
        here.source.let_go.clear()
    visits = len(here.source.visited)
    tickets["leaves"].cancel()
    assert here.engine.stats().running == 1
    here.let_go()
    here.wait("stays", "leaves")
    top_k = store.geometry.top_k
    assert all(len(experts) <= top_k for _, experts in here.source.visited[visits:])
    assert here.tokens("stays") == alone(store, prompts["stays"], max_tokens=6)
    # Nothing that was computed for the other one is taken over by anybody.
    again = (*prompts["leaves"], *here.tokens("leaves"))
    here.submit("again", again)
    here.wait("again")
    assert here.tokens("again") == alone(store, again)


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_deadline_ends_a_request_in_every_state(rig, state):
    now = [100.0]
    here = rig(sequences=1, clock=lambda: now[0])
    here.source.hold = at_the_first_layer(Phase.PREFILL)
    here.submit("first", deadline_seconds=5.0 if state == "running" else None)
    here.until_held()
    here.submit("second", deadline_seconds=5.0)
    visits = len(here.source.visited)
    now[0] += 6.0
    here.let_go()
    here.wait("first", "second")
    assert here.reason("second") is FinishReason.DEADLINE
    if state == "running":
        assert here.reason("first") is FinishReason.DEADLINE
        assert len(here.source.visited) == visits
    else:
        assert here.reason("first") is FinishReason.LENGTH


def test_an_expert_that_is_lost_ends_only_those_who_need_it(rig, store):
    prompts = {key: tuple(range(key, key + 6)) for key in range(0, 80, 20)}
    expected = {key: alone(store, prompt) for key, prompt in prompts.items()}
    here = rig()
    wanted = {}
    for key, prompt in prompts.items():
        here.submit(key, prompt)
        here.wait(key)
        wanted[key] = {(layer, expert) for layer, experts in here.source.visited for expert in experts}
        here.source.visited.clear()
    counts = {expert: [key for key in prompts if expert in wanted[key]] for expert in set().union(*wanted.values())}
    lost, losers = next((expert, keys) for expert, keys in counts.items() if 0 < len(keys) < len(prompts))

    def broken(layer, experts):
        if layer == lost[0] and lost[1] in experts:
            raise DriveError("no good copy", path="drive")

    here.source.broken = broken
    here.events.clear()
    for key, prompt in prompts.items():
        here.submit(key, prompt)
    here.wait(*prompts)
    for key in prompts:
        if key in losers:
            assert here.reason(key) is FinishReason.ERROR
            assert here.events[key][-1].error.message == "no good copy"
        else:
            assert here.reason(key) is FinishReason.LENGTH
            assert here.tokens(key) == expected[key]


def test_a_daemon_that_is_gone_ends_all_of_a_step_at_once_and_later_requests_are_served(rig):
    here = rig()
    here.source.hold = at_the_first_layer(Phase.PREFILL)
    for key in range(3):
        here.submit(key)
    here.until_held()

    def gone(_layer, _experts):
        raise DaemonUnavailable("the daemon is gone")

    here.source.broken = gone
    here.let_go()
    here.wait(0, 1, 2)
    assert {here.reason(key) for key in range(3)} == {FinishReason.ERROR}
    here.source.broken = None
    here.submit("later")
    here.wait("later")
    assert here.reason("later") is FinishReason.LENGTH


def test_a_defect_in_a_step_and_a_sink_that_fails_harm_nobody_else(rig, store):
    here = rig()

    def defect(_layer, _experts):
        raise ZeroDivisionError("a defect")

    here.source.broken = defect
    here.submit("meets it")
    here.wait("meets it")
    assert "ZeroDivisionError: a defect" in here.events["meets it"][-1].error.message
    here.source.broken = None

    def deaf(_events):
        raise ConnectionError("nobody is there")

    here.engine.submit(Request(prompt=(1, 2), params=GenerationParams(max_tokens=50, ignore_eos=True)), deaf)
    here.submit("hears", (5, 9, 2))
    here.wait("hears")
    assert here.tokens("hears") == alone(store, (5, 9, 2))
    while here.engine.stats().running:
        threading.Event().wait(0.001)
    assert here.engine.stats().finished["cancelled"] == 1


def test_closing_ends_what_runs_and_what_waits(rig):
    here = rig(sequences=1)
    here.source.hold = at_the_first_layer(Phase.PREFILL)
    here.submit("runs")
    here.until_held()
    here.submit("waits")
    closer = threading.Thread(target=here.engine.close)
    closer.start()
    while not here.engine._closing:
        threading.Event().wait(0.001)
    here.let_go()
    here.wait("runs", "waits")
    closer.join(60)
    assert not closer.is_alive()
    assert {here.reason(key) for key in ("runs", "waits")} == {FinishReason.CANCELLED}


def test_requests_of_any_order_are_all_answered_and_every_page_comes_back(rig, soak):
    """Many threads submit and cancel at random."""
    here = rig(sequences=4, max_waiting=8)
    answered = queue.SimpleQueue()

    def client(seed):
        generator = np.random.default_rng(seed)
        for _ in soak.rounds(12):
            gone, seen = threading.Event(), []

            def hear(events, gone=gone, seen=seen):
                seen.extend(events)
                if isinstance(events[-1], Done):
                    gone.set()

            prompt = tuple(generator.integers(0, 100, generator.integers(1, 90)).tolist())
            params = GenerationParams(max_tokens=int(generator.integers(0, 8)), ignore_eos=True)
            try:
                ticket = here.engine.submit(Request(prompt=prompt, params=params), hear)
            except QueueFull:
                continue
            if generator.random() < 0.4:
                gone.wait(float(generator.random()) * 0.01)
                ticket.cancel()
            assert gone.wait(60)
            answered.put(sum(isinstance(event, Done) for event in seen))

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(120 + soak.seconds)
    assert here.engine.stats().requests == answered.qsize() > 20
    assert {answered.get() for _ in range(answered.qsize())} == {1}


def test_a_client_is_told_to_come_again_when_a_request_has_probably_ended():
    pace = Pace(4)
    assert pace.seconds_until_a_place == 0
    pace.ended(40.0)
    assert pace.seconds_until_a_place == 10.0
    pace.ended(8.0)
    assert pace.seconds_until_a_place == 9.0
    pace.ended(1e9)
    assert pace.seconds_until_a_place == 600.0
    assert QueueFull("full", retry_after_seconds=0.2).retry_after_seconds == 1
    assert QueueFull("full", retry_after_seconds=7.1).retry_after_seconds == 8
