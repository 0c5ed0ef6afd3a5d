"""The commands convert, inspect and verify as a person or a script uses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inside import commands

from tierd.commands import convert, inspect, verify
from tierd.errors import StoreDamaged, UsageError

ORACLE = Path(__file__).parent.parent / "oracles" / "qwen3_moe"


@pytest.fixture
def run():
    return commands(convert, inspect, verify)


@pytest.fixture
def store(run, tmp_path):
    assert run("convert", ORACLE, tmp_path / "s", "--experts", "int4-g64", "--dense", "bf16").exit_code == 0
    return tmp_path / "s"


def test_convert_says_what_it_will_write_and_what_it_wrote(run, tmp_path):
    result = run("convert", ORACLE, tmp_path / "s", "--experts", "int8")
    assert result.exit_code == 0
    assert "qwen3_moe: " in result.stdout
    assert "experts  int8" in result.stdout
    assert "bytes per weight as planned, read back and verified" in result.stdout
    assert (tmp_path / "s" / "store.json").exists()


def test_convert_answers_scripts_in_json(run, tmp_path):
    result = run("convert", ORACLE, tmp_path / "s", "--json")
    table = json.loads(result.stdout)
    assert table["path"] == str(tmp_path / "s")
    assert table["fingerprint"] == json.loads((tmp_path / "s" / "store.json").read_text())["fingerprint"]


def test_shard_size_is_observed(run, tmp_path):
    run("convert", ORACLE, tmp_path / "s", "--shard-size", "64KiB")
    sizes = [path.stat().st_size for path in (tmp_path / "s").glob("experts-*.safetensors")]
    assert len(sizes) > 1
    assert max(sizes) <= 64 * 1024 + 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--experts", "int3"], "--experts 'int3'"), (["--shard-size", "much"], "--shard-size")],
)
def test_wrong_options_are_refused_by_name(run, tmp_path, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        run("convert", ORACLE, tmp_path / "s", *options)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "s").exists()


def test_inspect_describes_the_store(run, store):
    text = run("inspect", store).stdout
    table = json.loads(run("inspect", store, "--json").stdout)
    assert table["family"] == table["model_type"] == "qwen3_moe"
    assert table["expert_format"] == "int4-g64"
    assert table["experts_total"] == sum(layer["experts"] for layer in table["geometry"]["layers"])
    assert table["fingerprint"] in text
    assert "int4-g64" in text


def test_verify_exits_0_on_a_good_store_and_1_on_a_damaged_one(run, store):
    good = run("verify", store, "--json")
    assert good.exit_code == 0
    assert json.loads(good.stdout)["ok"] is True
    path = store / "experts-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    bad = run("verify", store, "--json")
    assert bad.exit_code == 1
    table = json.loads(bad.stdout)
    assert table["ok"] is False
    assert [problem["file"] for problem in table["problems"]] == [path.name]
    assert table["problems"][0]["expert"] is not None
    assert "! experts-00001.safetensors: layer" in run("verify", store).stdout


def test_a_truncated_store_is_refused_by_inspect(run, store):
    path = store / "dense-00001.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    with pytest.raises(StoreDamaged, match="3 bytes are missing"):
        run("inspect", store)
