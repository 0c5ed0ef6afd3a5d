"""The doctor names what is wrong, where, and what to do; and finds nothing where nothing is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil

import numpy as np
import pytest
from daemons import command
from inside import commands

from tierd.api import admin_pb2
from tierd.commands import doctor, mirror
from tierd.devices.device import RecordRead
from tierd.devices.fault_plan import FaultPlan, FaultRule
from tierd.devices.faults import FaultInjector
from tierd.devices.transfers import system_transfer
from tierd.doctor import host_checks, store_checks
from tierd.doctor.check import Status
from tierd.doctor.daemon_check import check_drives
from tierd.doctor.drive_checks import check_mirror
from tierd.doctor.host_checks import MemoryRoom, check_memory, memory_room
from tierd.doctor.settings_checks import check_settings
from tierd.doctor.store_checks import check_samples, sample_records
from tierd.errors import UsageError
from tierd.memory_limits import GroupLimit, HostMemory
from tierd.settings import ServeSettings
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

SHARDS = [f"experts-0000{n}.safetensors" for n in (1, 2, 3)]
PLENTY = MemoryRoom(("plenty",), free=1 << 40, for_experts=1 << 40)


@pytest.fixture
def store(tmp_path):
    return make_store(
        tmp_path / "s", layers=3, experts=4, top_k=2, fill="pattern", record_bytes=1 << 16, shard_bytes=4 << 16,
        dense={"d": np.ones(1000, np.float32)}, config={},
    )  # fmt: skip


@pytest.fixture
def run():
    return commands(doctor, mirror)


@pytest.fixture
def diagnose(run):
    """Run the doctor with --json; returns its exit code and the checks by status."""

    def invoke(*arguments):
        result = run("doctor", *arguments, "--json")
        table = json.loads(result.stdout)
        by_status = {status.value: [] for status in Status}
        for check in table["checks"]:
            by_status[check["status"]].append(check)
            assert check["detail"]
            assert check["remedy"] or check["status"] == "ok"
        expected = "problems" if by_status["problem"] else "remarks" if by_status["remark"] else "ok"
        assert table["status"] == expected
        assert result.exit_code == ["ok", "remarks", "problems"].index(expected)
        return result.exit_code, by_status

    return invoke


def details(checks):
    return " | ".join(check["detail"] for check in checks)


def test_nothing_is_wrong_with_a_good_store(store, diagnose, run):
    code, found = diagnose(store.path, "--deep")
    assert (code, found["problem"], found["remark"]) == (0, [], [])
    names = {check["name"] for check in found["ok"]}
    assert {
        "store", "files", "contents", "reads", "direct I/O", "bandwidth", "space", "memory", "huge pages",
        "membarrier", "sockets", "state", "open files", "settings",
    } == names  # fmt: skip
    assert store.fingerprint[:12] in details(found["ok"])
    text = run("doctor", store.path).stdout
    assert "✓ direct I/O" in text
    assert "0 problems · exit 0" in text


def test_a_good_mirror_on_the_same_drive_earns_one_remark(store, diagnose, run, tmp_path):
    run("mirror", "stage", store.path, tmp_path / "m")
    code, found = diagnose(store.path, "--mirror", tmp_path / "m")
    assert code == 1
    assert [check["name"] for check in found["remark"]] == ["mirror"]
    assert "same drive as the store" in details(found["remark"])
    assert any(check["name"] == "reads" and check["where"] == str(tmp_path / "m") for check in found["ok"])


def test_differing_files_of_a_mirror_are_named_with_their_remedy(store, run, tmp_path):
    folder = tmp_path / "m"
    run("mirror", "stage", store.path, folder)
    os.truncate(folder / SHARDS[1], 5000)
    (folder / SHARDS[2]).unlink()
    (left_out,) = [c for c in check_mirror(store, folder) if "will not be read" in c.detail]
    assert left_out.status is Status.REMARK
    assert SHARDS[1] in left_out.detail
    assert str(store.path / SHARDS[1]) in left_out.detail
    assert left_out.remedy == f"Make them anew: tierd mirror stage {store.path} {folder}"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder, _store: shutil.rmtree(folder), "no such directory"),
        (lambda folder, _store: [path.unlink() for path in folder.glob("experts-*")], "no shard that could be read"),
        (
            lambda folder, store: shutil.copy(store.path.parent / "other" / "store.json", folder / "store.json"),
            "no shard that could be read",
        ),
    ],
)
def test_a_useless_mirror_is_a_problem(store, run, tmp_path, spoil, words):
    make_store(tmp_path / "other", layers=1, experts=2, top_k=1)
    run("mirror", "stage", store.path, tmp_path / "m")
    spoil(tmp_path / "m", store)
    assert words in " | ".join(c.detail for c in check_mirror(store, tmp_path / "m") if c.status is Status.PROBLEM)


def test_cut_missing_and_changed_files_are_problems_that_name_the_file(store, diagnose):
    os.truncate(store.path / SHARDS[0], (store.path / SHARDS[0]).stat().st_size - 7)
    (store.path / SHARDS[1]).unlink()
    (store.path / "config.json").write_text("[]")
    code, found = diagnose(store.path)
    assert code == 2
    words = details(found["problem"])
    assert f"{SHARDS[0]}: 7 bytes are missing" in words
    assert f"{store.path / SHARDS[1]} cannot be read" in words
    assert "config.json" in words


def test_a_damaged_index_is_a_problem_and_no_traceback(store, diagnose):
    (store.path / "experts.npy").write_bytes(b"x" * 100)
    code, found = diagnose(store.path)
    assert (code, found["ok"]) == (2, [])
    assert "experts.npy" in details(found["problem"])


def test_what_is_no_store_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="not a store"):
        run("doctor", tmp_path)


def test_one_flipped_bit_is_found_by_a_deep_look(store, diagnose):
    place = store.location(1, 1)
    with place.path.open("r+b") as file:
        file.seek(place.offset + 9)
        file.write(b"\xff")
    assert diagnose(store.path)[0] == 0, "samples take the first and last records only"
    code, found = diagnose(store.path, "--deep")
    assert code == 2
    assert f"{place.path.name}: layer 1 expert 1" in details(found["problem"])


def test_one_flipped_bit_of_a_mirror_is_found_by_a_deep_look(store, diagnose, run, tmp_path):
    mirror = tmp_path / "m"
    run("mirror", "stage", store.path, mirror)
    code, found = diagnose(store.path, "--mirror", mirror, "--deep")
    assert (code, found["problem"]) == (1, [])
    assert [check["name"] for check in found["ok"] if check["where"] == str(mirror)].count("contents") == 1
    place = store.location(1, 1)
    with (mirror / place.path.name).open("r+b") as file:
        file.seek(place.offset + 9)
        file.write(b"\xff")
    code, found = diagnose(store.path, "--mirror", mirror, "--deep")
    assert code == 2
    (problem,) = found["problem"]
    assert problem["where"] == str(mirror)
    assert f"{place.path.name}: layer 1 expert 1" in problem["detail"]
    assert "tierd mirror stage" in problem["remedy"]


def faulty(rule):
    injector = FaultInjector(FaultPlan((rule,)), "nvme")

    def transfer(fd, buffers, offset):
        return injector.wrap(RecordRead(0, 0, 0, 0, offset, 1 << 16, 0), system_transfer)(fd, buffers, offset)

    return transfer


def test_one_failing_file_points_to_the_drive_and_names_file_and_offset(store):
    # The third read meets the error: two shards are read well.
    samples = sample_records(store, store.shard_paths, transfer=faulty(FaultRule(kind="eio", after=2)))
    (problem,) = [check for check in check_samples(samples) if check.status is Status.PROBLEM]
    assert f"{store.path / SHARDS[2]} at offset {store.location(2, 0).offset}" in problem.detail
    assert "Input/output error" in problem.detail
    assert "its drive is failing" in problem.remedy


def test_all_files_failing_points_to_the_mount(store):
    samples = sample_records(store, store.shard_paths, transfer=faulty(FaultRule(kind="vanish")))
    (problem,) = check_samples(samples)
    assert str(store.path / SHARDS[0]) in problem.detail
    assert "mount" in problem.remedy


def test_a_filesystem_without_direct_reads_is_remarked_and_its_speed_not_trusted(store, diagnose, monkeypatch):
    system_open = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return system_open(path, flags, *rest, **named)

    monkeypatch.setattr("tierd.devices.shard_file.os.open", refusing)
    code, found = diagnose(store.path)
    assert code == 1
    remarks = {check["name"]: check["detail"] for check in found["remark"]}
    assert "refused by the filesystem for 3 of 3 files" in remarks["direct I/O"]
    assert "cached reads, not trusted" in remarks["bandwidth"]


def test_the_tightest_limit_decides_what_experts_can_have(store):
    host = HostMemory(total=1 << 40, available=1 << 39)
    plenty = memory_room(store, 4, host, [])
    assert plenty.for_experts == store.geometry.experts_total * store.geometry.slot_bytes
    assert check_memory(store, plenty).status is Status.OK
    some = memory_room(store, 4, host, [GroupLimit("/a/memory.max", 95 << 20, 0)])
    assert some.free == 95 << 20
    assert "/a/memory.max" in check_memory(store, some).detail
    little = check_memory(store, memory_room(store, 4, host, [GroupLimit("/a/memory.max", 50 << 20, 10 << 20)]))
    assert little.status is Status.PROBLEM
    assert "this store needs at least" in little.detail


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"arena": "nonsense"}, "problem", "nonsense"),
        ({"arena": "10kB"}, "problem", "holds no expert; one takes"),
        ({"ram": "1MB"}, "problem", "are too few"),
        ({"history": "off", "state_dir": "{folder}"}, "remark", "history is off"),
        ({"pin": "{folder}/pins"}, "problem", "cannot be read"),
        ({"mirror": ("/nonexistent/mirror",)}, "problem", "/nonexistent/mirror is not there"),
        ({"mirror": ("{store}",)}, "remark", "is the store itself"),
        ({"also": ("{folder}",)}, "remark", "holds no shard"),
        ({"arena_dir": "{folder}"}, "problem", "not on a tmpfs"),
        ({"fault_plan": "{plan}"}, "remark", "damages reads on purpose"),
        ({"fault_plan": "{folder}"}, "problem", "cannot be read as a fault plan"),
    ],
)
def test_contradictory_settings_are_found(store, tmp_path, settings, status, words):
    (tmp_path / "plan.toml").write_text('[[fault]]\nkind = "eio"\n')

    def fill(text):
        return text.format(store=store.path, folder=tmp_path, plan=tmp_path / "plan.toml")

    filled = {name: tuple(map(fill, v)) if isinstance(v, tuple) else fill(v) for name, v in settings.items()}
    checks = check_settings(store, ServeSettings.load(config=None, table="serve", flags=filled), PLENTY)
    assert [check.status.value for check in checks] == [status]
    assert words in checks[0].detail


def test_an_arena_beyond_the_memory_is_a_problem_and_says_what_fits(store):
    settings = ServeSettings.load(config=None, table="serve", flags={"arena": "100%"})
    (check,) = check_settings(store, settings, MemoryRoom(("little",), free=1 << 19, for_experts=1 << 18))
    assert check.status is Status.PROBLEM
    assert check.remedy.startswith("Give --arena ")


def test_few_open_files_are_a_problem(store, monkeypatch):
    monkeypatch.setattr(host_checks.resource, "getrlimit", lambda _: (64, 4096))
    check = host_checks.check_descriptors(store, 2)
    assert check.status is Status.PROBLEM
    assert "ulimit -n" in check.remedy


def test_leftovers_of_something_interrupted_are_remarked(store):
    (store.path / (SHARDS[0] + ".partial")).write_bytes(b"x")
    (remark,) = [check for check in store_checks.check_files(store) if check.status is Status.REMARK]
    assert SHARDS[0] + ".partial" in remark.detail


def test_shards_in_another_directory_are_looked_at_where_they_are(store, diagnose, tmp_path):
    (tmp_path / "more").mkdir()
    shutil.move(store.path / SHARDS[2], tmp_path / "more")
    code, found = diagnose(store.path, "--also", tmp_path / "nowhere")
    assert code == 2
    assert f"also {tmp_path / 'nowhere'} is not there" in [check["detail"] for check in found["problem"]]
    code, found = diagnose(store.path, "--also", tmp_path / "more")
    assert code == 0
    assert {check["where"] for check in found["ok"] if check["name"] == "bandwidth"} == {
        str(store.path),
        str(tmp_path / "more"),
    }
    assert ExpertStore.open(store.path, [tmp_path / "more"]).fingerprint == store.fingerprint


def test_a_running_daemon_is_asked_for_its_drives(serve, store, tmp_path):
    shutil.copytree(store.path, tmp_path / "m")
    daemon = serve(store.path, "--mirror", tmp_path / "m")
    (tmp_path / "settings.toml").write_text(f'[serve]\nlisten = "{daemon.name}"\n')
    done = command("tierd", "doctor", store.path, "--config", tmp_path / "settings.toml", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["daemon"]["status"] == checks["drive nvme"]["status"] == checks["drive mirror1"]["status"] == "ok"
    assert str(tmp_path / "m") in checks["drive mirror1"]["detail"]
    daemon.kill()
    # One with another address for nodes answers operators at its local socket.
    (tmp_path / "settings.toml").write_text(f'[serve]\nlisten = "127.0.0.1:9"\nlocal = "{daemon.name}"\n')
    done = command("tierd", "doctor", store.path, "--config", tmp_path / "settings.toml", "--json")
    (left,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "daemon"]
    assert left["status"] == "remark"
    assert "nobody answers" in left["detail"]


def test_what_a_daemon_counted_against_a_drive_is_told_with_a_remedy():
    drives = [
        admin_pb2.Drive(name="nvme", state="up", up=True, reads=5),
        admin_pb2.Drive(name="mirror1", state="quarantined", up=False, errors=3, errors_by_kind={"io": 3}, stalls=1),
        admin_pb2.Drive(name="mirror2", state="suspect", up=True, errors=1, errors_by_kind={"checksum": 1}),
        admin_pb2.Drive(name="mirror3", state="absent", directory="/ssd3"),
    ]
    sound, out, shaky, absent = check_drives(admin_pb2.GetStatsResponse(drives=drives))
    assert [c.status for c in (sound, out, shaky, absent)] == ["ok", "problem", "remark", "problem"]
    assert "3 errors (3 io), 1 reads not answered in time" in out.detail
    assert "1 checksum" in shaky.detail
    assert "no shard to offer" in absent.detail
