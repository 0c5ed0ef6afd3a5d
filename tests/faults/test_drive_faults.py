"""Sick drives and damaged files under a running broker: right bytes from elsewhere or one clear error, never a hang."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
import structlog
from rigs import RECORD, Rig, copy_of, make_toy, open_descriptors, plan_file

from tierd.devices.probe import DriveProbe
from tierd.errors import DataLoss, DriveError, TierdError
from tierd.store.store import ExpertStore

HANGS_NOT = 60.0
"""Seconds; generous, so that only a hang exceeds it."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy") / "store")


@pytest.fixture
def own(toy, tmp_path):
    """A store that the test may damage."""
    return copy_of(toy, tmp_path / "own")


@pytest.fixture
def mirror(toy, tmp_path):
    return copy_of(toy, tmp_path / "mirror")


def flip(path, offset):
    """Change one bit, for direct and buffered readers alike."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


@pytest.mark.parametrize(
    ("fault", "quarantined"),
    [
        ({"kind": "eio", "times": 1}, False),
        ({"kind": "eio", "errno": "ENODEV", "times": 1}, True),
        ({"kind": "vanish", "times": 1}, True),
        ({"kind": "short", "times": 1}, True),
        ({"kind": "flip", "times": 1}, True),
    ],
)
async def test_a_failed_read_comes_from_the_other_drive(toy, mirror, tmp_path, fault, quarantined):
    plan = plan_file(tmp_path / "plan.json", fault | {"drive": "mirror1"})
    async with Rig(toy, mirror=(str(mirror),), fault_plan=plan) as rig:
        assert await rig.fetch_all() == []
        sick = rig.stats("mirror1")
        assert sick.errors == sick.failovers == 1
        assert sick.checksum_failures == (fault["kind"] == "flip")
        assert sick.up is not quarantined
        assert rig.stats("nvme").errors == 0
        assert rig.counts_agree()


async def test_a_flip_on_both_copies_is_data_loss_for_that_expert_alone(own, mirror):
    async with Rig(own, mirror=(str(mirror),)) as rig:
        for directory in (own, mirror):
            place = rig.store.location(1, 3)
            flip(directory / place.path.name, place.offset + RECORD - 1)
        with pytest.raises(DataLoss) as caught:
            await rig.fetch(1, 3)
        for part in ("layer 1, expert 3", "tried ", "nvme", "mirror1", str(own), str(mirror), str(place.offset)):
            assert part in str(caught.value)
        assert "tierd verify" in str(caught.value)
        errors = await rig.fetch_all()
        assert len(errors) == 1
        assert isinstance(errors[0], DataLoss)


@pytest.mark.parametrize("cut", [1, 4096, 8 * RECORD])
async def test_a_shard_cut_after_the_start_is_data_loss_and_never_zeros(own, cut):
    async with Rig(own) as rig:
        path = rig.store.shard_paths[-1]
        os.truncate(path, path.stat().st_size - cut)
        errors = await rig.fetch_all()
        lost = max(1, cut // RECORD)
        assert len(errors) == lost
        assert all(isinstance(error, DataLoss) and str(path) in error.message for error in errors)
        assert await rig.fetch_all() != []
        assert rig.stats().reads >= 64 - lost


async def test_a_shard_cut_after_the_start_is_served_by_the_mirror(own, mirror):
    async with Rig(own, mirror=(str(mirror),)) as rig:
        os.truncate(rig.store.shard_paths[0], 8192)
        assert await rig.fetch_all(times=2) == []


async def test_files_that_vanish_or_are_replaced_while_serving_do_not_matter(own, mirror):
    async with Rig(own, mirror=(str(mirror),)) as rig:
        rig.store.shard_paths[0].unlink()
        rig.store.shard_paths[1].rename(rig.store.shard_paths[2])
        for path in mirror.iterdir():
            path.unlink()
        assert await rig.fetch_all() == []


async def test_passing_errors_among_many_reads_are_retried_and_counted(toy, tmp_path):
    faults = [
        {"kind": "eio", "errno": name, "probability": 0.04, "experts": None} for name in ("EIO", "EAGAIN", "EINTR")
    ]
    async with Rig(toy, fault_plan=plan_file(tmp_path / "plan.json", *faults)) as rig:
        assert await rig.fetch_all(times=8, at_once=16) == []
        assert rig.stats().retries == rig.stats().errors > 10
        assert rig.counts_agree()


async def test_a_lasting_error_fails_exactly_that_expert_and_names_where(toy, tmp_path):
    plan = plan_file(tmp_path / "plan.json", {"kind": "eio", "experts": [17]})
    async with Rig(toy, fault_plan=plan) as rig:
        errors = await rig.fetch_all(times=2)
        assert len(errors) == 2
        place = rig.store.location(1, 1)
        for error in errors:
            assert isinstance(error, DriveError)
            assert not isinstance(error, DataLoss)
            for part in ("layer 1, expert 1", str(place.path), f"offset {place.offset}", "Input/output error", "mount"):
                assert part in str(error)


async def test_the_log_names_drive_file_and_remedy(toy, mirror, tmp_path):
    plan = plan_file(tmp_path / "plan.json", {"kind": "vanish", "drive": "mirror1"})
    with structlog.testing.capture_logs() as logs:
        async with Rig(toy, mirror=(str(mirror),), fault_plan=plan) as rig:
            assert await rig.fetch_all() == []
    quarantine = next(log for log in logs if log["event"] == "drive quarantined")
    assert quarantine["drive"] == "mirror1"
    assert str(mirror) in quarantine["reason"]
    assert quarantine["advice"]
    assert any("FAULT PLAN ACTIVE" in log["event"] for log in logs)


async def test_a_drive_that_hangs_for_ever_holds_only_its_own_threads(toy, mirror, tmp_path):
    plan = plan_file(tmp_path / "plan.json", {"kind": "hang", "drive": "mirror1"})
    async with Rig(toy, slots=16, mirror=(str(mirror),), fault_plan=plan, drive_threads=3) as rig:
        async with asyncio.timeout(HANGS_NOT):
            assert await rig.fetch_all(at_once=16) == []
        sick = rig.stats("mirror1")
        assert sick.stalls >= 1
        assert not sick.up
        assert 1 <= sick.in_flight <= 3
        hung = sick.in_flight
        assert rig.arena.counts().abandoned == hung
        async with asyncio.timeout(HANGS_NOT):
            assert await rig.fetch_all(at_once=16) == []
        assert sick.in_flight == hung, "it is left alone"


async def test_a_single_hanging_drive_ends_in_the_requests_deadline(toy, tmp_path):
    plan = plan_file(tmp_path / "plan.json", {"kind": "hang", "experts": [0]})
    async with Rig(toy, fault_plan=plan, drive_threads=2) as rig:
        async with asyncio.timeout(HANGS_NOT):
            with pytest.raises(TierdError, match=r"did not come within 0\.3"):
                await rig.fetch(0, 0, 0.3)
            await rig.fetch(0, 1)
        assert rig.arena.counts().filling == 1


async def test_abandoned_requests_of_slow_reads_leave_nothing_behind(toy, tmp_path):
    plan = plan_file(tmp_path / "plan.json", {"kind": "delay", "seconds": 0.2, "after": 1, "times": 12})
    async with Rig(toy, fault_plan=plan, drive_threads=4) as rig:
        await rig.fetch(0, 0)
        descriptors = open_descriptors()
        tasks = [asyncio.ensure_future(rig.fetch(1 + n // 16, n % 16)) for n in range(40)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert rig.broker.pending() == 0
        async with asyncio.timeout(HANGS_NOT):
            await rig.fetch(0, 0)
            await rig.fetch(0, 15)
            while rig.broker.reading:  # noqa: ASYNC110, the broker knows no asyncio
                await asyncio.sleep(0.01)
        counts = rig.arena.counts()
        assert counts.filling == counts.abandoned == counts.granted == 0
        assert open_descriptors() <= descriptors


async def test_unfilled_memory_never_reaches_a_caller_whatever_the_drives_do(toy, mirror, tmp_path):
    faults = [
        {"kind": kind, "probability": 0.1} | ({"seconds": 0.02} if kind in ("delay", "hang") else {})
        for kind in ("eio", "short", "flip", "delay", "hang", "vanish")
    ]
    async with Rig(toy, mirror=(str(mirror),), fault_plan=plan_file(tmp_path / "plan.json", *faults)) as rig:
        async with asyncio.timeout(60):
            errors = await rig.fetch_all(times=4, at_once=12)
        assert all(isinstance(error, DriveError) for error in errors)
        assert len(errors) < 64
        assert rig.counts_agree()
        injected = {kind for info in rig.drives.info.values() for kind in info.injector.injected}
        assert injected == {"eio", "short", "flip", "delay", "hang", "vanish"}


async def test_a_partial_mirror_serves_what_it_has(toy, tmp_path):
    partial = copy_of(toy, tmp_path / "partial", shards=[1])
    plan = plan_file(tmp_path / "plan.json", throttles=[{"drive": "nvme", "bytes_per_second": 6e6}])
    async with Rig(toy, mirror=(str(partial),), fault_plan=plan) as rig:
        assert rig.drives.info["mirror1"].shards == [1]
        assert await rig.fetch_all(times=2, at_once=2) == []
        held = sum(int(row["shard"]) == 1 for row in rig.store.index)
        assert rig.stats("mirror1").reads >= 0.9 * 2 * held
        assert rig.stats("nvme").errors == rig.stats("mirror1").errors == 0


async def test_a_store_split_over_directories_is_whole(toy, tmp_path):
    part = copy_of(toy, tmp_path / "part")
    other = copy_of(toy, tmp_path / "other", shards=[0, 2])
    for number in (0, 2):
        (part / toy.shard_paths[number].name).unlink()
    async with Rig(ExpertStore.open(part, [other]), also=(other,)) as rig:
        assert rig.drives.info["nvme"].shards == [1, 3]
        assert rig.drives.info["also1"].shards == [0, 2]
        assert await rig.fetch_all() == []
        assert rig.stats("nvme").reads + rig.stats("also1").reads == 64


async def test_a_mirror_that_comes_later_reads_as_many_at_a_time_as_there_are_spare_slots_and_says_so(
    toy, mirror, monkeypatch
):
    depths = {toy.path: 2, mirror: 8}
    monkeypatch.setattr(
        "tierd.service.drives.probe_drive", lambda paths, **_: DriveProbe(1e9, depths[paths[0].parent], "as given")
    )
    async with Rig(toy) as rig:
        later = await rig.drives.add(mirror)
        assert (rig.arena.spares, later.threads) == (3, 2)
        assert later.probe.how == "as given; 2 at a time until a start with --mirror, which counts spare slots for 8"
        assert await rig.fetch_all() == []
    async with Rig(toy, slots=20, mirror=(str(mirror),)) as rig:
        there = rig.drives.info["mirror1"]
        assert (rig.arena.spares, there.threads, there.probe.how) == (9, 8, "as given")


def refuse_direct(monkeypatch, directory):
    """A filesystem that opens files directly and refuses the first transfer."""
    refused = os.preadv

    def preadv(fd, buffers, offset):
        target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115, the target is no path
        flags = os.O_DIRECT & int(open(f"/proc/self/fdinfo/{fd}").read().split()[3], 8)  # noqa: PTH123, SIM115
        if flags and target.startswith(str(directory)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return refused(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_one_drive_that_refuses_direct_reads_is_read_through_the_cache_and_the_other_is_not(
    toy, mirror, monkeypatch
):
    refuse_direct(monkeypatch, mirror)
    with structlog.testing.capture_logs() as logs:
        async with Rig(toy, mirror=(str(mirror),)) as rig:
            assert await rig.fetch_all() == []
            assert rig.stats("nvme").direct
            assert not rig.stats("mirror1").direct
            assert rig.stats("mirror1").errors == 0
            assert rig.stats("mirror1").reads > 0
            assert not rig.drives.replicas.stats.direct
    warnings = [log for log in logs if "direct reads refused" in log["event"]]
    assert [log["drive"] for log in warnings] == ["mirror1"]


async def test_one_read_for_many_callers_even_when_it_moves_to_another_drive(toy, mirror, tmp_path):
    plan = plan_file(tmp_path / "plan.json", {"kind": "delay", "seconds": 0.1}, {"kind": "eio", "times": 1})
    async with Rig(toy, mirror=(str(mirror),), fault_plan=plan) as rig:
        await asyncio.gather(*(rig.fetch(2, 5) for _ in range(50)))
        total = rig.drives.replicas.stats
        assert total.reads == 1
        assert total.errors <= 2
