"""Which copies are admitted, how a drive is measured and remembered, fault plans, throttles, and the mirror option."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs import copy_of, make_toy

from tierd.devices.copies import admit_copy
from tierd.devices.device import RecordRead
from tierd.devices.fault_plan import FaultPlan, FaultRule, read_fault_plan
from tierd.devices.faults import FaultInjector
from tierd.devices.probe import DEFAULT_DEPTH, DriveProbe, probe_drive, with_some_in_hand
from tierd.devices.probe_cache import ProbeCache, probe_key
from tierd.devices.throttle import Throttle
from tierd.errors import StoreDamaged, UsageError
from tierd.service.mirror_option import Mirror, parse_mirror
from tierd.settings import ServeSettings
from tierd.state import state_directory
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy") / "store")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "store"
    return make_store(path, layers=1, experts=16, top_k=2, record_bytes=1 << 20, fill="pattern")


def read_of(expert, shard=0):
    return RecordRead(expert, 0, expert, shard, 0, 8192, 0)


class TestAdmission:
    def test_a_whole_copy_and_a_partial_one_without_a_manifest_are_admitted(self, toy, tmp_path):
        whole, part = copy_of(toy, tmp_path / "whole"), copy_of(toy, tmp_path / "part", shards=[1, 3])
        assert admit_copy(toy, whole).shards == [0, 1, 2, 3]
        copy = admit_copy(toy, part)
        assert copy.shards == [1, 3]
        assert copy.left_out == []
        assert copy.paths == [None, part / toy.shard_paths[1].name, None, part / toy.shard_paths[3].name]

    @pytest.mark.parametrize("damage", ["short", "long", "header", "folder", "link"])
    def test_a_different_file_is_left_out_naming_both(self, toy, tmp_path, damage):
        mirror = copy_of(toy, tmp_path / "mirror")
        path = mirror / toy.shard_paths[2].name
        match damage:
            case "short":
                os.truncate(path, path.stat().st_size - 1)
            case "long":
                os.truncate(path, path.stat().st_size + 1)
            case "header":
                data = bytearray(path.read_bytes())
                data[40] ^= 1
                path.write_bytes(data)
            case "folder":
                path.unlink()
                path.mkdir()
            case "link":
                path.unlink()
                path.symlink_to(tmp_path / "nowhere")
        copy = admit_copy(toy, mirror)
        assert copy.shards == [0, 1, 3]
        (problem,) = copy.left_out
        assert str(path) in problem
        assert str(toy.shard_paths[2]) in problem

    def test_the_copy_of_another_store_is_left_out_as_a_whole(self, toy, tmp_path):
        other = make_store(tmp_path / "other", layers=1, experts=4, top_k=2, record_bytes=16384, fill="pattern")
        (problem,) = admit_copy(toy, other.path).left_out
        assert str(other.path / "store.json") in problem
        assert str(toy.path / "store.json") in problem
        mirror = copy_of(toy, tmp_path / "mirror")
        (mirror / "store.json").write_text("{")
        copy = admit_copy(toy, mirror)
        assert copy.shards == []
        assert len(copy.left_out) == 1

    def test_the_store_itself_is_no_mirror_of_itself(self, toy, tmp_path):
        (tmp_path / "again").symlink_to(toy.path)
        copy = admit_copy(toy, tmp_path / "again")
        assert copy.shards == []
        assert all("same file" in problem for problem in copy.left_out)

    def test_a_split_store_opens_when_all_shards_are_somewhere(self, toy, tmp_path):
        part, rest = copy_of(toy, tmp_path / "part"), copy_of(toy, tmp_path / "rest", shards=[2])
        gone = part / toy.shard_paths[2].name
        gone.unlink()
        with pytest.raises(StoreDamaged, match=gone.name):
            ExpertStore.open(part)
        store = ExpertStore.open(part, [tmp_path, rest])
        assert store.shard_paths[2] == rest / gone.name
        assert (store.read_record(3, 3) == toy.read_record(3, 3)).all()
        os.truncate(rest / gone.name, 5000)
        with pytest.raises(StoreDamaged, match="missing at the end"):
            ExpertStore.open(part, [rest])


class TestProbe:
    def test_a_throttled_drive_is_found_as_fast_as_its_throttle(self, big):
        probe = probe_drive(big.shard_paths, record_bytes=1 << 20, wrapper=Throttle(bytes_per_second=100e6))
        assert 50e6 < probe.bandwidth < 130e6
        assert probe.depth >= 2
        assert "direct reads" in probe.how

    def test_what_the_page_cache_holds_is_not_measured(self, big, monkeypatch):
        for path in big.shard_paths:
            path.read_bytes()
        real = os.open

        def refusing(path, flags, *args):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return real(path, flags, *args)

        monkeypatch.setattr(os, "open", refusing)
        probe = probe_drive(big.shard_paths, record_bytes=1 << 20)
        assert (probe.bandwidth, probe.depth) == (None, DEFAULT_DEPTH)
        assert probe.how == "cached reads, not trusted"

    def test_a_failing_or_missing_drive_gives_no_figure_and_no_error(self, big, tmp_path):
        injector = FaultInjector(FaultPlan((FaultRule(kind="eio"),)), "nvme")
        assert probe_drive(big.shard_paths, record_bytes=1 << 20, wrapper=injector).bandwidth is None
        assert probe_drive([tmp_path / "absent"], record_bytes=1 << 20).bandwidth is None

    def test_long_records_are_read_few_at_a_time(self, big):
        assert probe_drive(big.shard_paths, record_bytes=40 << 20).depth == 2

    @pytest.mark.parametrize(
        ("wanted", "mebibytes", "begun"), [(8, 1, 16), (2, 1, 4), (8, 3, 16), (2, 19, 3), (2, 40, 2)]
    )
    def test_reads_are_in_hand_as_many_as_small_records_need_and_large_ones_allow(self, wanted, mebibytes, begun):
        assert with_some_in_hand(wanted, mebibytes << 20) == begun

    def test_a_result_is_remembered_until_the_file_the_drive_or_the_store_changes(self, toy, tmp_path):
        cache = ProbeCache(tmp_path / "probes")
        mirror = copy_of(toy, tmp_path / "mirror")
        paths = [mirror / path.name for path in toy.shard_paths]
        key = probe_key(paths, toy.fingerprint, 65536)
        assert cache.load(key) is None
        cache.save(key, DriveProbe(2e9, 4, "direct"))
        assert cache.load(key) == DriveProbe(2e9, 4, "direct")
        assert probe_key(toy.shard_paths, toy.fingerprint, 65536) != key
        assert probe_key(paths, "0" * 64, 65536) != key
        assert probe_key(paths, toy.fingerprint, 4096) != key
        moved = mirror.rename(tmp_path / "elsewhere")
        paths = [moved / path.name for path in toy.shard_paths]
        assert probe_key(paths, toy.fingerprint, 65536) == key
        os.utime(paths[0], ns=(1, 1))
        assert probe_key(paths, toy.fingerprint, 65536) != key

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "7",
            '{"bandwidth": "x", "depth": 1}',
            '{"version": 5, "bandwidth": -1, "depth": 4, "how": ""}',
        ],
    )
    def test_a_spoilt_file_is_as_none(self, tmp_path, text):
        (tmp_path / "key.json").write_text(text)
        assert ProbeCache(tmp_path).load("key") is None

    def test_what_cannot_be_written_is_not_remembered_and_no_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        ProbeCache(tmp_path / "file").save("key", DriveProbe(1e9, 4, "direct"))
        ProbeCache(tmp_path / "new").save("key", DriveProbe(None, 4, "cached"))
        assert not (tmp_path / "new").exists()

    def test_the_number_of_remembered_results_is_bounded(self, tmp_path):
        cache = ProbeCache(tmp_path)
        for number in range(300):
            (tmp_path / f"old{number}.json").write_text("{}")
        cache.save("new", DriveProbe(1e9, 4, "direct"))
        assert len(list(tmp_path.glob("*.json"))) == 256
        assert cache.load("new") is not None

    def test_it_lies_in_the_state_directory_of_the_user(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        assert state_directory() == tmp_path / "tierd"
        monkeypatch.delenv("XDG_STATE_HOME")
        assert state_directory() == Path.home() / ".local" / "state" / "tierd"


class TestFaultPlan:
    def test_the_selectors_choose_reads(self):
        rule = FaultRule(kind="eio", drive="b", experts={5}, shards={1}, from_seconds=10, until_seconds=20)
        assert rule.matches("b", read_of(5, 1), 10.0)
        assert not rule.matches("a", read_of(5, 1), 10.0)
        assert not rule.matches("b", read_of(4, 1), 10.0)
        assert not rule.matches("b", read_of(5, 0), 10.0)
        assert not rule.matches("b", read_of(5, 1), 9.9)
        assert not rule.matches("b", read_of(5, 1), 20.0)

    def test_after_and_times_count_per_drive(self):
        plan = FaultPlan((FaultRule(kind="eio", after=2, times=3),))
        for drive in ("a", "b"):
            hits = [bool(plan.decide(drive, read_of(n), 0.0)) for n in range(10)]
            assert hits == [False, False, True, True, True] + [False] * 5

    @given(st.integers(0, 1000), st.randoms(use_true_random=False))
    def test_chance_does_not_depend_on_the_order_of_reads(self, seed, rng):
        rules = (FaultRule(kind="eio", probability=0.3), FaultRule(kind="flip", probability=0.3))
        reads = [(drive, expert) for drive in "ab" for expert in range(20)] * 2
        outcomes = []
        for _ in range(2):
            plan, found = FaultPlan(rules, seed), {}
            for drive, expert in reads:
                kinds = tuple(rule.kind for rule in plan.decide(drive, read_of(expert), 0.0))
                found.setdefault((drive, expert), []).append(kinds)
            outcomes.append(found)
            rng.shuffle(reads)
        assert outcomes[0] == outcomes[1]

    def test_a_seed_gives_about_the_probability_asked_for(self):
        plan = FaultPlan((FaultRule(kind="eio", probability=0.2),), seed=3)
        hits = sum(bool(plan.decide("a", read_of(n), 0.0)) for n in range(2000))
        assert 300 < hits < 500

    def test_toml_and_json_say_the_same(self, tmp_path):
        (tmp_path / "p.toml").write_text('seed = 4\n[[fault]]\nkind = "vanish"\n[[throttle]]\nlatency = 0.5\n')
        (tmp_path / "p.json").write_text('{"seed": 4, "fault": [{"kind": "vanish"}], "throttle": [{"latency": 0.5}]}')
        toml, json = read_fault_plan(tmp_path / "p.toml"), read_fault_plan(tmp_path / "p.json")
        assert (toml.rules, toml.seed, toml.throttles) == (json.rules, json.seed, json.throttles)
        assert toml.throttle("any").latency == 0.5
        with pytest.raises(UsageError, match="absent"):
            read_fault_plan(tmp_path / "absent.toml")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("seed = ", "cannot be read as a fault plan"),
            ('[[fault]]\nkind = "fire"', "fault.0.kind"),
            ('[[fault]]\nkind = "eio"\nerrno = "EWHAT"', "EWHAT"),
            ('[[fault]]\nkind = "delay"', "needs `seconds`"),
            ('[[fault]]\nkind = "eio"\nprobability = 2', "fault.0.probability"),
            ("[[throttle]]\nbytes_per_second = 0", "throttle.0.bytes_per_second"),
            ("colour = 1", "colour"),
        ],
    )
    def test_a_wrong_plan_is_refused_naming_file_and_field(self, tmp_path, content, words):
        path = tmp_path / "plan.toml"
        path.write_text(content)
        with pytest.raises(UsageError, match=r"plan\.toml") as caught:
            read_fault_plan(path)
        assert words in caught.value.message


class TestThrottle:
    def test_reads_side_by_side_share_its_bandwidth_without_loss(self):
        throttle = Throttle(bytes_per_second=50e6)
        transfer = throttle.wrap(read_of(0), lambda _fd, buffers, _offset: buffers[0].nbytes)
        memory = memoryview(bytearray(100_000))
        began = time.monotonic()
        for _ in range(20):
            assert transfer(0, [memory], 0) == 100_000
        assert time.monotonic() - began >= 0.039

    def test_closing_lets_go_of_who_waits(self):
        throttle = Throttle(bytes_per_second=1.0, latency=1000.0)
        throttle.close()
        assert throttle.wrap(read_of(0), lambda *_: 5)(0, [memoryview(bytearray(5))], 0) == 5

    @pytest.mark.parametrize("bounds", [{"bytes_per_second": 0}, {"bytes_per_second": -1.0}, {"latency": -1.0}])
    def test_a_throttle_that_makes_no_sense_is_refused(self, bounds):
        with pytest.raises(UsageError):
            Throttle(**bounds)


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "mirror"),
        [
            ("/mnt/b", Mirror(Path("/mnt/b"))),
            ("/mnt/b=2", Mirror(Path("/mnt/b"), 2.0)),
            ("/mnt/b=0.5", Mirror(Path("/mnt/b"), 0.5)),
            ("/mnt/a=b", Mirror(Path("/mnt/a=b"))),
            ("/mnt/a=b=3", Mirror(Path("/mnt/a=b"), 3.0)),
            ("/mnt/with space, and comma", Mirror(Path("/mnt/with space, and comma"))),
        ],
    )
    def test_a_mirror_is_a_directory_and_perhaps_a_weight(self, text, mirror):
        assert parse_mirror(text) == mirror

    @pytest.mark.parametrize("text", ["", "=1", "/x=0", "/x=-2", "/x=inf", "/x=nan"])
    def test_nonsense_is_refused(self, text):
        with pytest.raises(UsageError, match="--mirror"):
            parse_mirror(text)

    def test_mirrors_come_from_flags_environment_or_file(self, monkeypatch, tmp_path):
        config = tmp_path / "c.toml"
        config.write_text('[serve]\nmirror = ["/a=2", "/b"]\nalso = ["/c"]\n')
        settings = ServeSettings.load(config=config, table="serve", flags={})
        assert (settings.mirror, settings.also) == (("/a=2", "/b"), (Path("/c"),))
        monkeypatch.setenv("TIERD_MIRROR", "/d:/e=3")
        assert ServeSettings.load(config=config, table="serve", flags={}).mirror == ("/d", "/e=3")
        assert ServeSettings.load(config=config, table="serve", flags={"mirror": ("/f",)}).mirror == ("/f",)
