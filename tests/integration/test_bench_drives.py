"""The bench of drives measures what it says: cold reads only, counted where they arrive, pair by pair."""

from __future__ import annotations

import json
import stat

import pytest
from daemons import command, eventually

from tierd.drivebench.cold_reads import ColdReads
from tierd.drivebench.figures import Paired, alternate
from tierd.drivebench.fio import FioJob, reserved_huge_pages
from tierd.drivebench.measure import SIZES, Effort, against_fio, cold_store, several_drives
from tierd.errors import DriveError

RECORD = 1 << 16
TINY = Effort(slices=2, seconds=0.05, request_bytes=4 * RECORD, together=1)


def test_every_read_of_the_bench_is_cold_and_counted_once(tmp_path):
    with cold_store(tmp_path, RECORD, TINY.request_bytes) as store:
        reads = ColdReads(store, request_bytes=TINY.request_bytes)
        try:
            # It goes round more than once, however slow this machine is just now.
            eventually(lambda: reads.run(0.1) >= 0 and reads.usage.nbytes > store.geometry.expert_bytes, 60)
            assert reads.usage.hits == 0
            drive = reads.stats()["drives"][0]
            assert reads.usage.nbytes == drive["bytes"] == drive["reads"] * RECORD
        finally:
            reads.close()
    assert list(tmp_path.iterdir()) == []


def test_sides_alternate_and_pairs_are_compared_with_each_other():
    order = []

    def side(name, results):
        def measure():
            order.append(name)
            return results.pop(0)

        return measure

    paired = alternate(side("ours", [10.0, 30.0, 8.0]), side("theirs", [20.0, 30.0, 10.0]), 3)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert paired.ratios == [0.5, 1.0, 0.8]
    table = paired.to_table("daemon", "fio")
    assert (table["median"], table["lowest"], table["highest"]) == (0.8, 0.5, 1.0)
    assert table["fio_bytes_per_second"] == [20.0, 30.0, 10.0]


def test_quartiles_of_many_pairs_leave_out_a_quarter_on_each_side():
    table = Paired(tuple(map(float, range(1, 21))), (1.0,) * 20).to_table("a", "b")
    assert (table["lower_quartile"], table["upper_quartile"]) == (6.0, 15.0)


@pytest.fixture
def fake_fio(tmp_path):
    """Return a job whose program says what it is told to say, and notes its arguments."""

    def make(text, code=0):
        program = tmp_path / "fio"
        program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/arguments\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return FioJob(str(program), tmp_path / "shard", 3 << 20, 4, huge=True)

    return make


def test_fio_reads_the_same_file_with_the_same_block_and_depth(fake_fio, tmp_path):
    job = fake_fio('fio: a warning\n{"jobs": [{"read": {"bw_bytes": 123}}]}')
    assert job.run(0.5) == 123
    arguments = (tmp_path / "arguments").read_text().split()
    assert {f"--filename={tmp_path}/shard", "--bs=3145728", "--iodepth=4", "--direct=1", "--readonly"} <= set(arguments)
    assert {"--runtime=500ms", "--ioengine=libaio", "--mem=shmhuge"} <= set(arguments)


@pytest.mark.parametrize(("text", "code"), [("no JSON", 0), ('{"jobs": []}', 0), ("refused", 1)])
def test_an_fio_that_fails_is_a_clear_error(fake_fio, text, code):
    with pytest.raises(DriveError, match="fio: "):
        fake_fio(text, code).run(0.1)


def test_without_fio_the_ratio_is_null_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with cold_store(tmp_path, RECORD, TINY.request_bytes) as store:
        assert against_fio(store, TINY) is None
    done = command("tierd", "bench", "drives", "--only", "fio", "--json", "--dir", tmp_path)
    answer = json.loads(done.stdout)
    assert answer["ratio_to_fio"] == dict.fromkeys(SIZES)
    assert any("fio is not installed" in note for note in answer["notes"])


def test_huge_pages_are_given_back(monkeypatch, tmp_path):
    number = tmp_path / "nr"
    number.write_text("3\n")
    monkeypatch.setattr("tierd.drivebench.fio._RESERVE", number)
    with reserved_huge_pages(5 << 20) as got:
        assert got
        assert number.read_text() == "6\n"
    assert number.read_text() == "3\n"
    monkeypatch.setattr("tierd.drivebench.fio._RESERVE", tmp_path / "none" / "nr")
    with reserved_huge_pages(1) as got:
        assert not got


@pytest.mark.soak
def test_several_drives_are_all_read_from_and_the_figures_are_there(tmp_path):
    two, three = several_drives(tmp_path, TINY, record_bytes=RECORD)
    assert len(two["two_drives_bytes_per_second"]) == TINY.slices
    assert three["bytes_by_drive"]["nvme"] > 0
    assert three["bytes_by_drive"]["mirror1"] > 0
    assert set(three["bytes_by_drive"]) == {"nvme", "mirror1", "mirror2"}


def test_a_part_that_does_not_exist_is_refused():
    done = command("tierd", "bench", "drives", "--only", "nothing")
    assert done.returncode == 2
    assert "none of fio, throttle, several" in " ".join(done.stderr.split())
