"""A replay has the daemon's own hits, and its comparison of policies says what it claims."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from simulation.by_hand import HeldDrive, SessionByHand
from simulation.clock import VirtualClock
from simulation.memory import PlainSessions, plain_arena
from simulation.records import RECORD_BYTES, VirtualStore
from typer.testing import CliRunner

from tierd.broker.broker import Broker
from tierd.cli import build_app
from tierd.errors import UsageError
from tierd.policy.contest import COLD, best_half_life, compete, gap_closed
from tierd.policy.expectation import Expectation
from tierd.policy.policies import DEFAULT_POLICY, POLICIES, make_policy
from tierd.policy.replay import ReplayArena, count_tokens, future, replay, requests_of, slots_of
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import load_trace
from tierd.policy.waves import wave_size
from tierd.requests import Phase

TRACES = Path(__file__).parents[1] / "bench" / "traces"
HELD = TRACES / "held.npz"


@pytest.fixture(scope="module")
def held():
    return load_trace(HELD)


def served_by_a_broker(trace, policy, slots, table):
    """The counts of the daemon's broker when one session asks for what the trace says, in waves, layer by layer."""
    store = VirtualStore(len(trace.layers), trace.layer_experts[0])
    arena, _, _ = plain_arena(slots=slots, slot_bytes=RECORD_BYTES, experts=len(store))
    drive, sessions, wave = HeldDrive(store), PlainSessions(len(store)), wave_size(slots, trace.top_k)
    broker = Broker(
        catalogue=store,
        memory=arena,
        policy=policy,
        device=drive,
        clock=VirtualClock(),
        max_experts_per_acquire=wave,
        sessions=sessions,
    )
    session = SessionByHand(broker, 1)
    expectation = Expectation(table) if table is not None else None
    if expectation is not None:
        sessions.expectations[1] = expectation.out
    tokens, flat = trace.tokens.tolist(), trace.flat()
    for request in requests_of(trace):
        rows = request.rows
        if expectation is not None and request.layer == 0:
            expectation.begin(tokens[rows.start : rows.stop])
        for begin in range(0, len(request.wanted), wave):
            experts = [flat_number % trace.layer_experts[0] for flat_number in request.wanted[begin : begin + wave]]
            phase = Phase.PREFILL if request.prefill else Phase.DECODE
            session.ask(*experts, layer=request.layer, phase=phase, step=request.step)
            drive.land(*drive.held)
        if expectation is not None:
            expectation.passed(request.layer)
            if request.layer == len(trace.layers) - 1:
                first_of_text = rows.start == 0 or trace.sequences[rows.start] != trace.sequences[rows.start - 1]
                expectation.end(
                    flat[rows.start : rows.stop], previous=None if first_of_text else tokens[rows.start - 1]
                )
    return broker.stats.phases


@pytest.mark.parametrize("prompt", [0, 50])
@pytest.mark.parametrize("slots", [25, 128])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_replay_has_exactly_the_hits_of_the_broker(held, name, slots, prompt):
    trace = held.head(100).with_prompts(prompt, 30)
    tables = [TokenTable(trace.layer_experts) if name == DEFAULT_POLICY else None for _ in range(2)]
    arena = ReplayArena(make_policy(name), slots)
    replay(trace, [arena], table=tables[0])
    phases = served_by_a_broker(trace, make_policy(name), slots, tables[1])
    for phase, counts in ((Phase.PREFILL, arena.prefill), (Phase.DECODE, arena.decode)):
        live = phases[phase]
        assert (counts.requests, counts.hits, counts.misses) == (live.requests, live.hits, live.misses)
    assert arena.decode.requests > 0
    assert (arena.prefill.requests > 0) == bool(prompt)
    assert len(arena.policy) == len(arena.resident) == slots


def test_a_request_keeps_the_order_in_which_the_routers_ranked(held):
    trace = held.head(4).with_prompts(2, 2)
    first, *_ = requests_of(trace)
    assert (first.rows, first.prefill) == (range(2), True)
    ranked = [int(trace.experts[row, 0, rank]) for rank in range(4) for row in range(2)]
    assert list(first.wanted) == list(dict.fromkeys(ranked))
    assert len(list(requests_of(trace))) == 3 * 8


def test_a_wave_is_half_of_the_arena_but_a_tokens_experts_at_least(held):
    assert [wave_size(slots, 4) for slots in (2, 4, 7, 8, 100)] == [2, 4, 4, 4, 50]
    assert max(map(len, future(held.head(128).with_prompts(128, 64), 20))) == 10


def test_an_arena_below_a_tokens_experts_is_refused(held):
    assert slots_of(held, 10) == 25
    with pytest.raises(UsageError, match=r"--arena 1%: 2 of 256"):
        slots_of(held, 1)
    with pytest.raises(UsageError, match="do not fit 2 slots"):
        ReplayArena(make_policy("lru"), 2).request([1, 2, 3], prefill=False)


def test_bounds_hold_and_the_gap_is_counted_between_them(held):
    trace = held.head(120)
    names = ["lru", "belady", *sorted(POLICIES)]
    scores = {(score.policy, score.percent): score.total for score in compete(trace, names, [25, 50], jobs=1)}
    for percent in (25, 50):
        bound = scores["belady", percent].hit_rate
        assert all(scores[name, percent].hit_rate <= bound for name in POLICIES)
        assert scores["lru", percent].hit_rate < bound
    assert {counts.requests for counts in scores.values()} == {120 * 8 * 4}
    assert gap_closed(0.4, 0.3, 0.5) == pytest.approx(0.5)
    assert gap_closed(0.3, 0.5, 0.5) is None


def test_what_is_counted_before_is_expected_from_the_first_step_on(held):
    trace = held.head(200)
    warm, cold = compete(trace, [DEFAULT_POLICY, COLD], [25], history=trace, jobs=1)
    assert warm.total.hits > cold.total.hits
    again = compete(trace, [DEFAULT_POLICY], [25], jobs=1)[0]
    assert again.total == cold.total


def test_counting_a_trace_is_what_its_steps_would_count(held):
    trace = held.head(520)
    counted, seen = TokenTable(trace.layer_experts), TokenTable(trace.layer_experts)
    count_tokens(trace, counted)
    replay(trace, [], table=seen)
    for name, array in counted.as_arrays().items():
        assert np.array_equal(array, seen.as_arrays()[name]), name


def test_the_best_half_life_is_where_the_hits_are_most(held):
    trace = held.head(100)
    best = best_half_life(trace, [50], jobs=1)
    lives = (8, 16, 32, 64, 128, 256, 512)
    scores = compete(trace, [f"decayed-frequency-{life}" for life in lives], [50], jobs=1)
    hits = {score.policy: score.total.hits for score in scores}
    place = [*hits].index(best)
    assert all(hits[best] >= hits[name] for name in [*hits][max(0, place - 1) : place + 2])


def run(*arguments, code=0):
    done = CliRunner().invoke(build_app("replay"), ["replay", *map(str, arguments)])
    if code:
        assert isinstance(done.exception, UsageError), done.output
        return str(done.exception)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_the_command_answers_with_all_figures_by_policy_and_size(tmp_path, held):
    history = tmp_path / "train.npz"
    np.savez(history, tokens=held.tokens[-120:], experts=held.experts[-120:], window=np.array(60))
    fitted = ["--train", history, "--policy", f"slru,{DEFAULT_POLICY}", "--arena", "10%,50%"]
    shown = ["--expert-bytes", "2kB", "--jobs", 1, "--json", "--plot", tmp_path / "out.png"]
    answer = json.loads(run(HELD, "--tokens", 120, "--prompt", 70, *fitted, *shown))
    assert answer["default"] == DEFAULT_POLICY
    policies = answer["policies"]
    best = answer["best_decayed_frequency"]
    assert set(policies) == {"lru", "belady", best, DEFAULT_POLICY, COLD, "slru"}
    assert best.startswith("decayed-frequency-")
    for figures in policies.values():
        for percent in ("10", "50"):
            rate = figures["hit_rate"][percent]
            phases = [figures[f"{phase}_hit_rate"][percent] for phase in ("prefill", "decode")]
            assert min(phases) <= rate <= max(phases)
            assert figures["bytes_read"][percent] % 2000 == 0
    assert (policies["lru"]["gap_closed"]["50"], policies["belady"]["gap_closed"]["50"]) == (0, 1)
    assert (answer["tokens"], answer["prefill_tokens"], answer["slots"]) == (120, 70, {"10": 25, "50": 128})
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_a_table_for_people():
    output = run(HELD, HELD, "--tokens", 60, "--policy", "lru", "--arena", "25%", "--jobs", 1)
    assert "belady" in output
    assert "60 tokens" in " ".join(output.split())
    assert "which is assumed" in output


def test_all_policies_are_compared_where_that_is_asked_for():
    answer = json.loads(run(HELD, "--tokens", 6, "--policy", "all", "--arena", "50%", "--jobs", 1, "--json"))
    assert set(POLICIES) - set(answer["policies"]) == {"decayed-frequency"}
    few = json.loads(run(HELD, "--tokens", 6, "--arena", "50%", "--jobs", 1, "--json"))
    assert set(few["policies"]) == {"lru", "belady", DEFAULT_POLICY, few["best_decayed_frequency"]}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_contest_tells_of_each_policy_that_has_been_through(held, jobs):
    lines = []
    compete(held.head(8), ["lru", "belady"], [50], jobs=jobs, tell=lines.append)
    assert [line.split()[0] for line in lines] == ["lru", "belady"]
    assert "2 of 2" in lines[1]


def test_several_processes_count_the_same(held):
    trace = held.head(40)
    assert compete(trace, ["lru", "belady"], [25], jobs=2) == compete(trace, ["lru", "belady"], [25], jobs=1)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--arena", "5"], "no percentage"),
        (["--arena", "0%"], "no percentage"),
        (["--arena", "10%,ten%"], "'ten%'"),
        (["--arena", "10%,10%"], "twice"),
        (["--arena", "1%"], "fewer than a token's 4"),
        (["--policy", "lru,best"], "'best'"),
        (["--tokens", "60", "--expert-bytes", "many"], "--expert-bytes"),
    ],
)
def test_wrong_use_of_the_command_is_refused(arguments, what):
    assert what in run(HELD, *arguments, "--tokens", 8, "--jobs", 1, code=2)


def test_a_history_of_another_model_is_refused(tmp_path, held):
    np.savez(tmp_path / "other.npz", tokens=held.tokens[:8], experts=held.experts[:8, :5], window=np.array(8))
    assert "another model" in run(HELD, "--train", tmp_path / "other.npz", code=2)


def test_a_trace_without_a_step_is_refused(tmp_path, held):
    np.savez(tmp_path / "none.npz", tokens=held.tokens[:0], experts=held.experts[:0], window=np.array(8))
    assert "no step" in run(tmp_path / "none.npz", code=2)


def test_a_chart_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = run(HELD, "--tokens", 8, "--policy", "lru", "--jobs", 1, "--plot", tmp_path / "a.png", code=2)
    assert "[bench]" in message


def test_a_chart_that_cannot_be_written_is_named(tmp_path):
    message = run(HELD, "--tokens", 8, "--policy", "lru", "--jobs", 1, "--plot", tmp_path / "no" / "a.png", code=2)
    assert "cannot be written" in message


def test_on_real_routing_the_default_beats_decayed_frequency_and_that_beats_lru(held):
    history = load_trace(TRACES / "train.npz").head(3072)
    names = ["lru", "decayed-frequency", DEFAULT_POLICY]
    scores = compete(held.head(1024), names, [10, 50], history=history, jobs=1)
    for percent in (10, 50):
        lru, frequency, default = (
            next(score.total.hit_rate for score in scores if (score.policy, score.percent) == (name, percent))
            for name in names
        )
        assert default > frequency + 0.005
        assert frequency > lru + 0.02
