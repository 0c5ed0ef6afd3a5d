"""`tierd demo --json`, the contract for machines: one object whose figures add up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from compute_node import embedded
from compute_node.kernels import warm_up
from tierd import demonstration

FIGURES = {
    "token_ids", "tokens_per_second", "time_to_first_token_seconds", "requests", "hits", "misses", "joined",
    "cancelled", "failed", "node_unique_experts", "bytes_read", "arena_bytes", "wait_seconds", "compute_seconds",
    "limit_share", "lost_to",
}  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory, embedded_store):
    """The object that the demonstration prints, and its cache."""
    cache = tmp_path_factory.mktemp("cache")
    # What is compiled and converted already is not made again. A link to the directory would not be trusted.
    (cache / "tierd" / "demo").mkdir(parents=True)
    (cache / "tierd" / "kernels").mkdir(mode=0o700)
    being_written = shutil.ignore_patterns("*.tmp.*")  # another test's process may compile just now
    shutil.copytree(warm_up(), cache / "tierd" / "kernels" / warm_up().name, ignore=being_written)
    name = f"embedded-int4-g64-{demonstration._identity(embedded.path())}"
    shutil.copytree(embedded_store, cache / "tierd" / "demo" / name)
    run = subprocess.run(
        [sys.executable, "-m", "tierd", "demo", "--json", "--arena", "25%", "--tokens", "24"],
        capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), cache


def test_both_runs_add_up(shown):
    content, _ = shown
    assert set(content) >= FIGURES | {
        "text",
        "experts_bytes",
        "fingerprint",
        "direct",
        "identical",
        "everything_in_ram",
    }
    full = content["everything_in_ram"]
    assert set(full) >= FIGURES
    record_bytes = content["experts_bytes"] // 256
    for figures in (content, full):
        answered = sum(figures[name] for name in ("hits", "misses", "joined", "cancelled", "failed"))
        assert figures["requests"] == answered == figures["node_unique_experts"]
        assert figures["failed"] == figures["cancelled"] == 0
        assert figures["bytes_read"] == figures["misses"] * record_bytes
        assert figures["tokens_per_second"] > 0
        assert figures["time_to_first_token_seconds"] > 0
        assert min(1, figures["limit_share"]) + sum(figures["lost_to"].values()) == pytest.approx(1)
    assert content["arena_bytes"] == content["experts_bytes"] // 4
    assert full["arena_bytes"] == content["experts_bytes"]
    assert full["misses"] < content["misses"]


def test_a_quarter_and_all_of_the_arena_say_the_same(shown):
    content, _ = shown
    assert len(content["token_ids"]) == 24
    assert content["token_ids"] == content["everything_in_ram"]["token_ids"]
    assert content["identical"] is True
    assert content["text"].strip()


def test_the_converted_model_is_kept_and_a_damaged_one_converted_again(shown, monkeypatch):
    _, cache = shown
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    lines = []
    kept = demonstration.embedded_store(lines.append)
    assert lines == []
    assert [path.name for path in (cache / "tierd" / "demo").iterdir()] == [kept.path.name]
    shard = kept.path / kept.manifest.shards[0].file
    os.truncate(shard, 100)
    again = demonstration.embedded_store(lines.append)
    assert "damaged" in lines[0]
    assert again.path == kept.path
    assert again.fingerprint == kept.fingerprint
    assert shard.stat().st_size > 1 << 20
