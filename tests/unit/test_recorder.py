"""The flight recorder: bounded, cheap, and a trace that the usual viewers take."""

from __future__ import annotations

import json

from tierd.devices.device import RecordRead
from tierd.errors import DriveError
from tierd.observe.activity import Activity
from tierd.observe.recorder import FlightRecorder
from tierd.requests import AcquireRequest, Granted, Outcome, Phase, Reason, Refused
from tierd.store.synthetic import make_store


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def named(trace, name):
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_it_shows_the_last_seconds_only():
    clock = Clock()
    recorder = FlightRecorder(clock)
    recorder.instant("a", "old", (), ())
    clock.now += 8
    recorder.span("b", "long", 101.0, 108.0, ("layer",), (3,))
    clock.now += 4
    recorder.instant("a", "new", (), ())
    trace = recorder.trace()
    assert not named(trace, "old")
    (long,) = named(trace, "long")
    assert (long["ph"], long["ts"], long["dur"], long["args"]) == ("X", -11e6, 7e6, {"layer": 3})
    (new,) = named(trace, "new")
    assert (new["ph"], new["ts"]) == ("i", 0)
    tracks = {event["tid"]: event["args"]["name"] for event in named(trace, "thread_name")}
    assert {tracks[long["tid"]], tracks[new["tid"]]} == {"a", "b"}
    assert trace["otherData"] == {"seconds": 10.0, "events": 2, "monotonic_seconds": 112.0}


def test_it_is_bounded_and_says_how_far_back_it_goes():
    clock = Clock()
    recorder = FlightRecorder(clock, most=10)
    for number in range(100):
        clock.now += 0.5
        recorder.instant("a", f"event {number}", (), ())
    trace = recorder.trace()
    assert len(recorder) == 10
    assert recorder.noted == 100
    assert trace["otherData"] == {"seconds": 4.5, "events": 10, "monotonic_seconds": 150.0}
    assert json.loads(recorder.dump()()) == trace
    assert len(named(json.loads(recorder.dump(1.0)()), "event 99")) == 1
    assert json.loads(recorder.dump(1.0)())["otherData"]["events"] == 3


def test_an_empty_one_gives_a_trace():
    assert FlightRecorder(Clock()).trace()["otherData"]["events"] == 0


def test_requests_reads_and_evictions_become_events_and_histograms(tmp_path):
    clock = Clock()
    geometry = make_store(tmp_path / "s", layers=2, experts=4, top_k=2, fill="pattern").geometry
    activity = Activity(geometry, clock)
    activity.opened(7, "a node")
    activity.asked(7, AcquireRequest(1, 1, (0, 2), Phase.PREFILL))
    activity.answered(7, 1, [Granted(0, 1, Outcome.HIT)], [])
    clock.now += 0.02
    read = RecordRead(expert=6, layer=1, index=2, shard=0, offset=4096, nbytes=8192, xxh3=0)
    activity.read_ended("nvme", read, 0.001, 0.015, 8192, None)
    activity.answered(7, 1, [], [Refused(2, Reason.UNAVAILABLE, "no drive")])
    activity.answered(7, 1, [Granted(0, 1, Outcome.HIT)], [])  # a request that is over
    activity.read_ended("nvme", read, 0.0, 0.001, 0, DriveError("gone", path="x", offset=0, length=1))
    activity.evicted(6)
    activity.hinted(7, 1, 5)
    clock.now += 0.5
    activity.asked(7, AcquireRequest(2, 1, (2,)))
    activity.asked(7, AcquireRequest(3, 9, (2,)))  # no such layer: the broker will end the session
    activity.closed(7, "the node left")
    trace = activity.recorder.trace()
    (layer,) = named(trace, "layer 1")
    assert layer["dur"] == 20000
    assert layer["args"] == {
        "layer": 1, "phase": "prefill", "asked": 2, "hits": 1, "misses": 0, "joined": 0, "refused": 1
    }  # fmt: skip
    (good,), (bad,) = named(trace, "read"), named(trace, "read failed")
    assert (good["dur"], good["args"]["queued_ms"], good["args"]["expert"]) == (15000, 1.0, 2)
    assert bad["args"]["error"] == "gone"
    assert named(trace, "evict")[0]["args"] == {"layer": 1, "expert": 2}
    assert named(trace, "hint")[0]["args"] == {"layer": 1, "experts": 5}
    assert named(trace, "opened")[0]["args"] == {"node": "a node"}
    assert named(trace, "closed")[0]["args"] == {"why": "the node left"}
    assert abs(activity.layer_waits[Phase.PREFILL].total - 0.02) < 1e-9
    assert sum(activity.layer_waits[Phase.DECODE].counts) == 0
    assert sum(activity.regrets.counts) == 1
    assert abs(activity.regrets.total - 0.5) < 1e-9
    assert activity.uses.tolist() == [0, 0, 0, 0, 1, 0, 2, 0]
