"""Health as a state machine; what is learned of a drive's speed; when a read is late; what an error means."""

from __future__ import annotations

import errno
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.devices.device import RecordRead
from tierd.devices.failure import (
    ERROR_KINDS,
    MAX_RETRIES,
    blames_drive,
    blames_record,
    error_kind,
    is_transient,
    retry_delay,
    verdict,
)
from tierd.devices.health import DriveHealth, HealthState
from tierd.devices.hedging import HedgeBudget, Judgement, Patience, late_after, stalled_after
from tierd.devices.histogram import Histogram
from tierd.devices.speed import DEFAULT_BANDWIDTH, DriveSpeed
from tierd.errors import ChecksumMismatch, DataLoss, DriveError

MIB = 1 << 20
READ = RecordRead(77, 3, 5, 1, 4096, 8192, 0)


def quarantined(now=0.0):
    health = DriveHealth()
    assert health.failed(now, grave=True)
    return health


def test_passing_failures_make_a_drive_suspect_and_success_clears_it():
    health = DriveHealth()
    for _ in range(10):
        assert not health.failed(0.0, grave=False)
        assert health.state is HealthState.SUSPECT
        assert health.usable
        assert not health.failed(0.0, grave=False)
        health.succeeded()
        assert health.state is HealthState.UP


def test_three_failures_in_a_row_or_a_grave_one_quarantine_it():
    health = DriveHealth()
    assert [health.failed(5.0, grave=False) for _ in range(3)] == [False, False, True]
    assert not health.usable
    assert health.probe_at == 6.0
    assert not quarantined().usable


def test_a_quarantined_drive_is_not_believed_without_a_probe():
    health = quarantined()
    health.succeeded()
    assert health.state is HealthState.QUARANTINED
    assert not health.failed(0.5, grave=True), "it is quarantined already"
    assert health.probe_at == 1.0
    assert not health.begin_probe(0.99)
    assert health.begin_probe(1.0)
    assert not health.begin_probe(1.0), "one probe at a time"
    assert not health.usable
    health.succeeded()
    assert health.state is HealthState.UP


def test_failing_probes_come_ever_later_up_to_a_minute_and_success_starts_anew():
    health, now, gaps = quarantined(), 0.0, []
    for _ in range(9):
        gaps.append(health.probe_at - now)
        now = health.probe_at
        assert health.begin_probe(now)
        assert health.failed(now, grave=False)
    assert gaps == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert health.begin_probe(health.probe_at)
    health.succeeded()
    assert health.failed(100.0, grave=True)
    assert health.back_off == 1.0


@given(st.lists(st.sampled_from(["good", "bad", "grave", "probe", "wait"]), max_size=60))
def test_it_is_usable_exactly_while_up_or_suspect_and_a_probe_is_always_to_come(events):
    health, now = DriveHealth(), 0.0
    for event in events:
        match event:
            case "good":
                health.succeeded()
            case "bad":
                health.failed(now, grave=False)
            case "grave":
                health.failed(now, grave=True)
            case "probe":
                health.begin_probe(now)
            case "wait":
                now += 20.0
        assert health.usable == (health.state in (HealthState.UP, HealthState.SUSPECT))
        assert health.state is not HealthState.QUARANTINED or 0 < health.probe_at <= now + health.back_off
        assert health.back_off <= 60


def run(speed, seconds_each, count, *, at_once=1, nbytes=MIB):
    """Reads of a drive that works on one after the other, `at_once` of them submitted together."""
    now = 0.0
    for _ in range(count // at_once):
        expected = [speed.submitted(nbytes, now) for _ in range(at_once)]
        for one in expected:
            now += seconds_each
            speed.completed(one, now, good=True)
        now += 1.0
    return now


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_bandwidth_is_learned_whatever_the_queue_and_the_pauses(at_once):
    speed = DriveSpeed(bandwidth=5e9)
    run(speed, 0.01, 160, at_once=at_once)
    assert speed.bandwidth == pytest.approx(MIB / 0.01, rel=0.01)
    assert speed.predict(MIB) == pytest.approx(0.01, rel=0.1)
    assert speed.queued_bytes == 0


def test_an_unmeasured_drive_has_a_default_and_a_weight_scales_it():
    assert DriveSpeed().bandwidth == DEFAULT_BANDWIDTH
    assert DriveSpeed(weight=2.0).bandwidth == 2 * DEFAULT_BANDWIDTH


def test_failed_and_dropped_reads_teach_nothing_and_leave_nothing_queued():
    speed = DriveSpeed(bandwidth=1e9)
    speed.completed(speed.submitted(MIB, 0.0), 100.0, good=False)
    speed.dropped(speed.submitted(MIB, 100.0))
    assert speed.bandwidth == 1e9
    assert speed.queued_bytes == 0
    assert speed.latency == 0.0


def test_a_read_is_late_after_what_ninety_nine_of_a_hundred_took():
    speed = DriveSpeed(bandwidth=MIB / 0.01)
    expected = speed.submitted(MIB, 0.0)
    assert late_after(speed.p99, expected.seconds) == inf
    assert 0.5 <= stalled_after(speed.p99, expected.seconds) <= 1.0
    speed.dropped(expected)
    run(speed, 0.01, 100)
    assert speed.p99 == pytest.approx(1.0, abs=0.05)
    assert late_after(speed.p99, speed.submitted(MIB, 0.0).seconds) == pytest.approx(0.0125, rel=0.1)
    for factor in (5.0,) * 16:
        expected = speed.submitted(MIB, 0.0)
        speed.completed(expected, factor * expected.seconds, good=True)
    assert speed.p99 > 2


def test_a_long_queue_makes_no_read_late():
    speed = DriveSpeed(bandwidth=MIB / 0.01)
    run(speed, 0.01, 100)
    queue = [speed.submitted(MIB, 0.0) for _ in range(100)]
    assert late_after(speed.p99, queue[-1].seconds) > 1.0
    assert stalled_after(speed.p99, queue[-1].seconds) > 3.0


def test_a_read_among_others_that_end_is_late_first_then_overdue_and_stalls_only_after_a_reprieve():
    speed = DriveSpeed(bandwidth=MIB / 0.01)
    patience, now, judged = Patience(speed, speed.submitted(MIB, 0.0)), 0.0, []
    while Judgement.STALLED not in judged and now < 10:
        speed.completed(speed.submitted(MIB, now), now + 0.01, good=True)
        now += 0.01
        if now >= patience.next_look:
            judged.append(patience.judge(now))
    assert judged == [Judgement.LATE, Judgement.STALLED]
    assert now > 1.0


def test_a_silent_drive_is_stalled_whatever_its_queue():
    speed = DriveSpeed(bandwidth=MIB / 0.01)
    run(speed, 0.01, 100)
    begun = speed.last_completion
    patiences = [Patience(speed, speed.submitted(MIB, begun)) for _ in range(200)]
    assert patiences[0].judge(begun + 0.4) is Judgement.LATE
    assert patiences[199].judge(begun + 0.4) is Judgement.WAIT
    assert {p.judge(begun + 0.51) for p in patiences} == {Judgement.STALLED}


def test_hedges_are_at_most_one_in_twenty_after_a_short_burst():
    budget, spent = HedgeBudget(), 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert 50 <= spent <= 54


@pytest.mark.parametrize(
    ("error", "kind", "transient", "record"),
    [
        (ChecksumMismatch("x"), "checksum", False, True),
        (DriveError("cut"), "short", False, True),
        (DriveError("x", errno=errno.EIO), "io", True, False),
        (DriveError("x", errno=errno.EAGAIN), "io", True, False),
        (DriveError("x", errno=errno.EACCES), "io", False, False),
        (DriveError("x", errno=errno.ENODEV), "vanished", False, False),
        (DriveError("x", errno=errno.EINVAL), "refused", False, False),
        (DriveError("x", errno=errno.ECANCELED), "cancelled", False, False),
    ],
)
def test_what_an_error_means(error, kind, transient, record):
    assert error_kind(error) == kind
    assert kind in ERROR_KINDS
    assert is_transient(error) == transient
    assert blames_record(error) == record
    assert blames_drive(error) == (kind not in ("refused", "cancelled"))


def test_retries_are_few_and_back_off():
    delays = [retry_delay(n) for n in range(MAX_RETRIES)]
    assert delays == sorted(delays)
    assert sum(delays) < 0.5


def test_the_verdict_is_data_loss_only_when_no_drive_may_still_have_it():
    bad = ChecksumMismatch("drive a: wrong checksum", path="/a/s", offset=4096, length=8192)
    cut = DriveError("drive b: ends early", path="/b/s")
    ill = DriveError("drive c: EIO", path="/c/s", errno=errno.EIO, hint="look at the cable")
    lost = verdict(READ, {"a": bad, "b": cut})
    assert isinstance(lost, DataLoss)
    assert (lost.path, lost.offset, lost.length, lost.errno) == ("/a/s", 4096, 8192, 0)
    assert "layer 3, expert 5" in lost.message
    assert "tried a, b" in lost.message
    later = verdict(READ, {"a": bad, "c": ill})
    assert not isinstance(later, DataLoss)
    assert (later.path, later.errno, later.hint) == ("/c/s", errno.EIO, "look at the cable")


def test_a_histogram_counts_each_duration_once_up_to_its_bound():
    histogram = Histogram((0.001, 0.01))
    for seconds in (0.0005, 0.001, 0.002, 5.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 1, 1]
    assert histogram.cumulative() == [("0.001", 2), ("0.01", 3), ("+Inf", 4)]
    assert histogram.total == pytest.approx(5.0035)
