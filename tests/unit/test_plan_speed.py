"""The prediction of tokens per second: what is fitted from runs, and what follows for other arenas and drives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.commands.plan_speed import Lacking, MeasuredRun, NodeSpeed, fit_speed, load_run
from tierd.errors import UsageError

READ = 0.004
LITTLE = Lacking(10, {1: 20, 2: 10, 3: 10})
HALF = Lacking(10, {1: 12, 2: 4})
MUCH = Lacking(10, {4: 40})
NOTHING = Lacking(10, {})


def run_of(speed, lacking, drives=1):
    seconds = speed.step_seconds(lacking, READ, drives)
    return MeasuredRun("r", 8, seconds, seconds - speed.compute_seconds)


def test_reads_of_a_layer_are_shared_by_the_drives():
    assert (LITTLE.asked, LITTLE.experts) == (4, 7)
    assert LITTLE.reads(1) == (20 + 2 * 10 + 3 * 10) / 10
    assert LITTLE.reads(2) == (20 + 10 + 2 * 10) / 10
    assert LITTLE.reads(9) == LITTLE.asked


@given(st.floats(0.001, 1), st.floats(0, 0.1), st.floats(0, 0.1), st.integers(1, 3))
def test_three_runs_say_what_computing_a_message_and_an_expert_take(compute, message, expert, drives):
    speed = NodeSpeed(compute, message, expert, drives)
    runs = [run_of(speed, lacking, drives) for lacking in (LITTLE, HALF, MUCH)]
    found = fit_speed(runs, [LITTLE, HALF, MUCH], READ, drives)
    assert found == NodeSpeed(*(pytest.approx(value, abs=1e-7) for value in (compute, message, expert)), drives)


@given(st.floats(0.001, 1), st.floats(0.0001, 0.1), st.integers(1, 3))
def test_two_runs_say_it_where_a_message_costs_as_much_as_six_experts(compute, message, drives):
    speed = NodeSpeed(compute, message, message / 6, drives)
    runs = [run_of(speed, lacking, drives) for lacking in (LITTLE, HALF)]
    found = fit_speed(runs, [LITTLE, HALF], READ, drives)
    wanted = (compute, message, message / 6)
    assert found == NodeSpeed(*(pytest.approx(value, abs=1e-7) for value in wanted), drives)


@pytest.mark.parametrize("lacking", [LITTLE, HALF])
def test_one_run_says_it_by_its_own_split(lacking):
    speed = NodeSpeed(0.02, 0.0006, 0.0001)
    assert fit_speed([run_of(speed, lacking)], [lacking], READ, 1) == NodeSpeed(
        *(pytest.approx(value) for value in (0.02, 0.0006, 0.0001))
    )


def test_reads_that_hide_behind_computing_are_seen_in_runs():
    speed = NodeSpeed(0.03, -0.5 * READ, 0)
    for sizes in ([LITTLE], [LITTLE, NOTHING]):
        found = fit_speed([run_of(speed, lacking) for lacking in sizes], sizes, READ, 1)
        assert found == NodeSpeed(pytest.approx(0.03), pytest.approx(-0.5 * READ), 0)


def test_a_run_that_lacked_nothing_says_nothing_of_messages():
    found = fit_speed([run_of(NodeSpeed(0.02, 5, 5), NOTHING)], [NOTHING], READ, 1)
    assert found == NodeSpeed(pytest.approx(0.02), 0, 0)


def test_runs_that_contradict_each_other_still_give_a_time_above_zero():
    runs = [MeasuredRun("little", 8, 0.9, 0.4), MeasuredRun("half", 16, 0.1, 0.05)]
    found = fit_speed(runs, [LITTLE, HALF], READ, 1)
    assert found.compute_seconds > 0
    assert found.step_seconds(HALF, READ, 1) > 0


def test_reads_behind_computing_cost_nothing_but_never_less():
    assert NodeSpeed(0.02, -10 * READ, 0).step_seconds(LITTLE, READ, 1) == 0.02
    assert NodeSpeed(0.02, -2 * READ, 0).step_seconds(LITTLE, READ, 1) == pytest.approx(0.02 + READ)


def test_a_layer_waits_for_the_slowest_of_drives_that_were_not_there_when_it_was_measured():
    message, pair, four = 0.002, Lacking(1, {2: 1}), Lacking(1, {4: 1})
    one, two = NodeSpeed(0.02, message, 0), NodeSpeed(0.02, message, 0, drives=2)
    assert one.step_seconds(pair, READ, 1) == pytest.approx(0.02 + message + 2 * READ)
    assert one.step_seconds(pair, READ, 2) == pytest.approx(0.02 + 1.5 * message + READ)
    assert one.step_seconds(four, READ, 4) == pytest.approx(0.02 + (1 + 1 / 2 + 1 / 3 + 1 / 4) * message + READ)
    assert two.step_seconds(pair, READ, 2) == pytest.approx(0.02 + message + READ)
    assert two.step_seconds(four, READ, 4) == pytest.approx(0.02 + 25 / 18 * message + READ)


@given(st.floats(-0.1, 1), st.floats(0, 0.1), st.integers(1, 3), st.integers(1, 5))
def test_one_more_drive_is_never_foretold_to_be_slower(message, expert, measured, drives):
    speed = NodeSpeed(0.02, message, expert, measured)
    for lacking in (LITTLE, HALF, MUCH):
        with_one_more = speed.step_seconds(lacking, READ, measured + drives)
        assert with_one_more <= speed.step_seconds(lacking, READ, measured) + 1e-12


GOOD = {
    "token_ids": list(range(11)), "arena_slots": 8, "fingerprint": "f",
    "decode": {"seconds": 2.0, "wait_seconds": 0.5},
}  # fmt: skip


def test_a_run_is_read_per_step(tmp_path):
    (tmp_path / "r").write_text(json.dumps(GOOD))
    run = load_run(tmp_path / "r", "f")
    assert (run.slots, run.seconds, run.wait_seconds) == (8, 0.2, 0.05)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fingerprint": "g"}, "another store"),
        ({"arena_slots": None}, "without a daemon"),
        ({"arena_slots": 0}, "without a daemon"),
        ({"token_ids": [1, 2]}, "fewer than"),
        ({"token_ids": 7}, "not what a run of compute-node printed"),
        ({"decode": {"seconds": 1.0, "wait_seconds": 2.0}}, "fewer than"),
        ({"decode": {"seconds": "x", "wait_seconds": 2.0}}, "not what a run of compute-node printed"),
        ({"decode": 3}, "not what a run of compute-node printed"),
    ],
)
def test_what_is_no_run_of_this_store_is_refused(tmp_path, change, why):
    (tmp_path / "r").write_text(json.dumps(GOOD | change))
    with pytest.raises(UsageError, match=why):
        load_run(tmp_path / "r", "f")


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"[1]", b"{}"])
def test_a_file_that_is_nothing_of_the_kind_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises(UsageError, match=str(tmp_path)):
        load_run(tmp_path / "r", "f")
