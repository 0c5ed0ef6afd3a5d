"""The page's data: frames that tell what changed, only while somebody looks, and to slow viewers a new beginning."""

from __future__ import annotations

import asyncio
import json
import struct
from itertools import islice

import numpy as np

from tierd.observe import page_stream
from tierd.observe.expert_view import ExpertSources, ExpertView, Place
from tierd.observe.live_series import LiveSeries, StepCounter
from tierd.observe.page_stream import MOST_VIEWERS, Frame, PageStream


class Scene:
    """What a view looks at, changed by hand."""

    def __init__(self, experts):
        self.present = np.zeros(experts, dtype=bool)
        self.copies = np.ones(experts, dtype=np.uint8)
        self.asked = np.zeros(experts, dtype=np.uint32)
        self.reading = []
        self.unasked = {}
        self.rates = np.zeros(experts)

    @property
    def sources(self):
        return ExpertSources(
            present=self.present.copy,
            copies=lambda: self.copies,
            reading=lambda: self.reading,
            asked=lambda: self.asked,
            unasked=lambda: {session: uses.copy() for session, uses in self.unasked.items()},
            rates=lambda: self.rates,
        )


def frames(data):
    found = []
    while data:
        kind, length = struct.unpack_from("<B3xI", data)
        found.append((Frame(kind), data[8 : 8 + length]))
        data = data[8 + length :]
    return found


LAYERS = [(0, 4), (1, 4), (2, 4)]
EXPERTS = 12


def make_stream(scene):
    return PageStream(LAYERS, scene.sources, lambda: {"now": 1}, lambda: {"time": [0.5]})


def test_an_expert_that_is_being_read_is_seen_on_its_way():
    scene = Scene(4)
    scene.reading = [2]
    view = ExpertView(scene.sources)
    assert view.places.tolist() == [1, 1, Place.READING, 1]
    scene.reading, scene.present[2] = [], True
    assert view.look(0.1).tolist() == [2]
    assert view.places[2] == Place.RAM


def test_a_view_tells_places_moves_uses_and_heat():
    scene = Scene(6)
    scene.copies[:] = [0, 1, 2, 3, 1, 1]
    scene.present[4] = True
    view = ExpertView(scene.sources)
    assert view.places.tolist() == [Place.NOWHERE, Place.ONE_DRIVE, Place.DRIVES, Place.DRIVES, Place.RAM, 1]
    scene.present[[4, 5]] = [False, True]
    scene.asked[1] += 3
    scene.unasked[7] = np.array([0, 0, 2, 0, 0, 0], dtype=np.uint32)
    assert view.look(0.1).tolist() == [4, 5]
    assert view.used.tolist() == [0, 3, 2, 0, 0, 0]
    assert view.heat().tolist() == [0, 255, round(255 * (2 / 3) ** 0.5), 0, 0, 0]
    scene.unasked[7] = np.array([0, 0, 2, 0, 0, 1], dtype=np.uint32)
    assert view.look(0.1).size == 0
    assert view.used.tolist() == [0, 0, 0, 0, 0, 1]
    # The session ends, and its uses with it; nothing was used.
    scene.unasked.clear()
    view.look(0.1)
    assert not view.used.any()


def test_counters_that_wrap_are_still_one_use():
    scene = Scene(1)
    scene.asked[0] = 2**32 - 1
    view = ExpertView(scene.sources)
    scene.asked += np.uint32(1)
    view.look(0.1)
    assert view.used.tolist() == [1]


def test_heat_begins_with_what_is_remembered_and_fades_for_what_is_not_used():
    scene = Scene(2)
    scene.rates[:] = [0.0, 4.0]
    view = ExpertView(scene.sources)
    assert view.heat().tolist() == [0, 255]
    scene.asked[0] += 80
    view.look(20.0)
    assert view.heat().tolist() == [255, round(255 * (10 / 80) ** 0.5)]


async def test_a_viewer_gets_a_snapshot_then_changes(monkeypatch):
    monkeypatch.setattr(page_stream, "_TICK_SECONDS", 0.001)
    scene = Scene(EXPERTS)
    scene.present[5] = True
    stream = make_stream(scene)
    viewer = stream.frames()
    first = frames(await anext(viewer))
    assert [kind for kind, _ in first] == [Frame.SNAPSHOT, Frame.PAST, Frame.LIVE]
    layers = struct.unpack_from("<7I", first[0][1])
    assert layers == (3, 0, 4, 1, 4, 2, 4)
    places = first[0][1][28:40]
    assert [flat for flat, place in enumerate(places) if place == Place.RAM] == [5]
    assert json.loads(first[1][1]) == {"time": [0.5]}
    scene.present[[5, 6]] = [False, True]
    scene.asked[6] += 300
    kinds = []
    while Frame.CHANGES not in kinds:
        kinds += [kind for kind, payload in frames(await anext(viewer)) if (changes := payload) is not None]
    moved, used = struct.unpack_from("<II", changes)
    words = struct.unpack_from(f"<{moved + used}I", changes, 8)
    assert [(word & 0xFFFFFF, word >> 24) for word in words] == [(5, Place.ONE_DRIVE), (6, Place.RAM), (6, 255)]
    await viewer.aclose()


async def test_it_looks_only_while_somebody_looks_on(monkeypatch):
    monkeypatch.setattr(page_stream, "_TICK_SECONDS", 0.001)
    stream = make_stream(Scene(EXPERTS))
    await asyncio.sleep(0.01)
    assert stream.looks == 0
    viewer = stream.frames()
    await anext(viewer)
    await anext(viewer)
    assert stream.looks > 0
    await viewer.aclose()
    await asyncio.sleep(0.01)
    before = stream.looks
    await asyncio.sleep(0.01)
    assert stream.looks == before
    again = stream.frames()
    assert frames(await anext(again))[0][0] is Frame.SNAPSHOT
    await again.aclose()


async def test_a_look_that_fails_ends_the_streams_and_the_next_viewer_sees_again(monkeypatch):
    monkeypatch.setattr(page_stream, "_TICK_SECONDS", 0.001)
    stream = make_stream(Scene(EXPERTS))
    viewer = stream.frames()
    await anext(viewer)
    failing = stream._ticking
    monkeypatch.setattr(stream, "_changes", lambda: 1 // 0)
    assert [data async for data in viewer] == []
    assert isinstance(failing.exception(), ZeroDivisionError)
    monkeypatch.delattr(stream, "_changes")
    again = stream.frames()
    assert frames(await anext(again))[0][0] is Frame.SNAPSHOT
    assert [kind for kind, _ in frames(await anext(again))] == [Frame.LIVE]
    await again.aclose()


async def test_viewers_are_bounded_and_a_close_ends_them():
    stream = make_stream(Scene(EXPERTS))
    viewers = [stream.frames() for _ in range(MOST_VIEWERS)]
    for viewer in viewers:
        await anext(viewer)
    assert stream.full
    assert [data async for data in stream.frames()] == []
    stream.close()
    for viewer in viewers:
        assert [data async for data in viewer] == []
    assert stream.viewers == 0


async def test_a_slow_viewer_gets_a_new_snapshot_instead_of_ever_more_frames(monkeypatch):
    monkeypatch.setattr(page_stream, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(page_stream, "_MOST_QUEUED", 4)
    scene = Scene(EXPERTS)
    stream = make_stream(scene)
    viewer = stream.frames()
    await anext(viewer)
    for _ in range(100):
        scene.asked[0] += 1
        await asyncio.sleep(0)
    received = []
    while Frame.SNAPSHOT not in received:
        received += [kind for kind, _ in frames(await anext(viewer))]
    assert len(received) < 20
    await viewer.aclose()


def test_steps_are_counted_though_nodes_come_and_go():
    steps = {1: 100}
    counter = StepCounter(lambda: steps)
    assert counter.total() == 0
    steps[1] += 5
    assert counter.total() == 5
    steps[2] = 40
    assert counter.total() == 5
    del steps[1]
    steps[2] += 2
    assert counter.total() == 7


def test_the_past_is_bounded_and_comes_in_columns():
    values = iter(range(1000))
    series = LiveSeries(lambda: {"requests": next(values)})
    assert series.columns() == {"time": []}
    for now in islice(range(0, 2000, 2), 400):
        series.take(float(now))
    columns = series.columns()
    assert len(columns["time"]) == len(columns["requests"]) == 301
    assert columns["time"][-1] - columns["time"][0] == 600
    series.take(100.0)
    assert series.columns()["time"] == [100.0]
