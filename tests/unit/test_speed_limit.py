"""How near an answer ran to the machine's limit, and what it lost to what."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from compute_node.bench import memory_bandwidth as bandwidth
from compute_node.bench.geometries import geometry_named
from compute_node.bench.random_model import RandomModel
from compute_node.engine.limit import DecodeCost, SpeedLimit, dense_bytes_of_a_token, expert_bytes_of_a_token
from tierd.checkpoint.convert import convert
from tierd.client.limit_words import LOSSES, limit_words
from tierd.memory_limits import GroupLimit, HostMemory
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"


def cost(**given):
    return DecodeCost(**{"seconds": 10.0, "compute_seconds": 6.0, "wait_seconds": 3.0, "message_seconds": 0.5} | given)


def test_memory_alone_leaves_all_waits_as_losses():
    limit = SpeedLimit(cost(), 20, memory_seconds=4.0)
    assert limit.tokens_per_second == 5
    assert limit.share == pytest.approx(0.4)
    assert limit.lost_to == pytest.approx(
        {"messages": 0.05, "between_tokens": 0.1, "drive_waits": 0.25, "computing": 0.2}
    )


def test_a_busy_drive_is_no_loss():
    limit = SpeedLimit(cost(compute_seconds=1.0, wait_seconds=8.5), 20, memory_seconds=1.0, drive_seconds=7.0)
    assert limit.share == pytest.approx(0.7)
    # Of 8 s of waiting the drive needed 7, one of them while memory could be read as well.
    assert limit.lost_to == pytest.approx(
        {"messages": 0.05, "between_tokens": 0.05, "drive_waits": 0.2, "computing": 0.0}
    )


@pytest.mark.parametrize("memory", [0.5, 4.0, 9.5])
@pytest.mark.parametrize("drive", [0.0, 2.0, 9.9])
@pytest.mark.parametrize("given", [{}, {"compute_seconds": 12.0}, {"wait_seconds": 0.0, "message_seconds": 0.0}])
def test_share_and_losses_add_up(memory, drive, given):
    limit = SpeedLimit(cost(**given), 7, memory, drive)
    assert set(limit.lost_to) == set(LOSSES)
    assert min(limit.lost_to.values()) >= 0
    assert limit.share + sum(limit.lost_to.values()) == pytest.approx(1)


def test_weights_in_the_cache_may_beat_memory():
    limit = SpeedLimit(cost(), 10, memory_seconds=15.0)
    assert limit.share == 1.5
    assert not any(limit.lost_to.values())
    assert "this run was faster (150 %)" in limit_words(limit.tokens_per_second, limit.share, limit.lost_to)


def test_the_sentence_names_losses_by_size():
    lost = {"messages": 0.03, "between_tokens": 0.001, "drive_waits": 0.07, "computing": 0.0}
    assert limit_words(236.4, 0.899, lost) == (
        "this run could not be faster than 236 tok/s: it reached 90 %, and lost 7 % to drive waits, 3 % to messages"
    )
    assert limit_words(0.314, 1.0, {}) == "this run could not be faster than 0.31 tok/s: it reached 100 %"


@pytest.mark.parametrize("share", [0.2567, 0.4449, 0.3333])
def test_the_told_percents_add_up(share):
    left = 1 - share
    lost = {"messages": 0.335 * left, "between_tokens": 0.335 * left, "drive_waits": 0.33 * left, "computing": 0.0}
    told = limit_words(100, share, lost)
    assert sum(int(part) for part in re.findall(r"(\d+) %", told)) == 100


def test_waits_are_called_what_they_were():
    assert "80 % to waiting for workers" in limit_words(100, 0.2, {"drive_waits": 0.8}, waits="waiting for workers")


def test_a_token_reads_what_the_random_models_say():
    config = geometry_named("olmoe-1b-7b").config | {
        "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "num_hidden_layers": 2,
    }  # fmt: skip
    model = RandomModel(config)
    assert expert_bytes_of_a_token(model.manifest.geometry) == model.expert_bytes_of_a_token


def test_the_embedding_table_is_read_only_where_it_is_the_head(tmp_path):
    convert(ORACLES / "qwen3_moe", tmp_path / "store", dense="int8")
    manifest = ExpertStore.open(tmp_path / "store").manifest
    sizes = {info.name: info.nbytes for info in manifest.dense}
    table = sum(size for name, size in sizes.items() if name.startswith("model.embed_tokens.weight"))
    head = sum(size for name, size in sizes.items() if name.startswith("lm_head.weight"))
    assert dense_bytes_of_a_token(manifest, tied_embeddings=False) == sum(sizes.values()) - table
    assert dense_bytes_of_a_token(manifest, tied_embeddings=True) == sum(sizes.values()) - head
    assert table > 0
    assert head > 0


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements, which take no time here."""
    found = []
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda threads, nbytes: found.append((threads, nbytes)) or 2e10)
    bandwidth.memory_bandwidth.cache_clear()
    yield found
    bandwidth.memory_bandwidth.cache_clear()


def test_the_bandwidth_is_measured_once_a_machine(measured, tmp_path):
    folder = tmp_path / "memory"
    for _ in range(2):
        assert bandwidth.memory_bandwidth(2, folder) == 2e10
        bandwidth.memory_bandwidth.cache_clear()
    assert [threads for threads, _ in measured] == [2]
    assert bandwidth.memory_bandwidth(3, folder) == 2e10
    assert [threads for threads, _ in measured] == [2, 3]
    assert len(list(folder.iterdir())) == 2


def test_a_figure_that_an_answer_beat_is_measured_again_a_few_times(tmp_path, monkeypatch):
    rates = iter([1e10, 3e10, 2e10, 2e10, 9e10])
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda _threads, _nbytes: next(rates))
    bandwidth.memory_bandwidth.cache_clear()
    assert bandwidth.remeasured_bandwidth(2, tmp_path) is None, "nothing was known that could have been beaten"
    assert bandwidth.memory_bandwidth(2, tmp_path) == 1e10
    assert [bandwidth.remeasured_bandwidth(2, tmp_path) for _ in range(5)] == [3e10, None, None, None, None]
    assert bandwidth.memory_bandwidth(2, tmp_path) == 3e10, "the best of all measurements is remembered"
    assert next(rates) == 9e10, "after four of them the machine is believed"
    bandwidth.memory_bandwidth.cache_clear()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 1}', b'{"version": 1, "bytes_per_second": "nan"}'])
def test_a_damaged_memory_of_it_is_measured_again(measured, tmp_path, content):
    (tmp_path / f"{bandwidth.machine_key(2)}.json").write_bytes(content)
    assert bandwidth.memory_bandwidth(2, tmp_path) == 2e10
    assert len(measured) == 1
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_bytes())["bytes_per_second"] == 2e10


def test_it_is_known_where_nothing_can_be_written(measured, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert [bandwidth.memory_bandwidth(2, tmp_path / "file") for _ in range(2)] == [2e10, 2e10]
    assert len(measured) == 1


def test_nothing_is_measured_where_memory_is_short(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "spare_memory", lambda: 100 << 20)
    assert bandwidth.memory_bandwidth(2, tmp_path) is None
    assert not measured


def test_spare_memory_is_the_least_of_host_and_control_groups(monkeypatch):
    groups = []
    monkeypatch.setattr(bandwidth, "host_memory", lambda: HostMemory(total=2000, available=1000))
    monkeypatch.setattr(bandwidth, "group_limits", lambda: groups)
    monkeypatch.setattr(bandwidth, "private_bytes", lambda: 50)
    assert bandwidth.spare_memory() == 1000
    groups += [GroupLimit("a", 5000, 0), GroupLimit("b", 900, 100)]
    assert bandwidth.spare_memory() == 750
    groups.append(GroupLimit("c", 900, 870))
    assert bandwidth.spare_memory() == 0


def test_each_cache_of_a_processor_counts_once(tmp_path):
    for number, (size, cores) in enumerate([("32768K", "0-1"), ("32768K", "0-1"), ("16384K", "2"), ("odd", "3")]):
        folder = tmp_path / f"cpu{number}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
        (folder / "shared_cpu_list").write_text(f"{cores}\n")
    (tmp_path / "cpu9/cache/index3").mkdir(parents=True)
    assert bandwidth.cache_bytes(tmp_path) == 48 << 20
    assert bandwidth.cache_bytes(tmp_path / "nowhere") == 0


def test_plain_reading_is_timed():
    assert 1e8 < bandwidth.measure_bandwidth(2, 1 << 20, seconds=0.001) < 1e14
