from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from tierd.checkpoint.config import text_settings

NAMES = (
    "olmoe", "olmoe_clip", "mixtral", "mixtral_sliding", "mixtral_f16", "qwen3_moe", "qwen3_moe_tied",
    "qwen3_moe_bf16", "qwen3_moe_shards", "gpt_oss", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vl",
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "kimi_k2", "minimax_m2",
)  # fmt: skip
CODED = ("deepseek_v3_fp8", "deepseek_v3_fp8_ue8m0", "gpt_oss_mxfp4", "kimi_k2_int4")


@pytest.fixture
def oracles(request):
    return request.config.rootpath / "tests" / "oracles"


@pytest.mark.parametrize("name", NAMES + CODED)
def test_a_folder_is_small_and_its_arrays_agree_with_its_configuration(oracles, name):
    folder = oracles / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 320_000
    config = text_settings(json.loads((folder / "config.json").read_text()))
    vocabulary, chosen = config["vocab_size"], config["num_experts_per_tok"]
    with np.load(folder / "ref.npz") as arrays:
        assert arrays["input_ids"].shape == (1, 24)
        assert arrays["logits"].shape == (1, 24, vocabulary)
        assert arrays["greedy_logits"].shape == (16, vocabulary)
        assert np.array_equal(arrays["greedy_logits"].argmax(-1), arrays["greedy"])
        np.testing.assert_allclose(arrays["greedy_logits"][0], arrays["logits"][0, -1], atol=1e-5)
        layers = sorted(key.removeprefix("route_idx_") for key in arrays if key.startswith("route_idx_"))
        assert layers
        for layer in layers:
            experts, weights = arrays[f"route_idx_{layer}"], arrays[f"route_w_{layer}"]
            assert experts.shape == weights.shape == (24, chosen)
            assert np.all(np.diff(experts, axis=1) > 0)
            assert np.all(weights > 0)


def test_the_embedded_reference_has_three_prompts(oracles):
    with np.load(oracles / "embedded.npz") as arrays:
        assert arrays["greedy"].shape == (3, 64)
        assert arrays["logits"].shape == (3, 4096)
        assert np.array_equal(arrays["logits"].argmax(-1), arrays["greedy"][:, 0])
        assert np.all(arrays["top2_gap"] > 2e-3)
        assert all(arrays[f"prompt_{n}"].size for n in range(3))


@pytest.mark.oracle
def test_the_script_makes_the_folders_again(oracles, tmp_path):
    command = [sys.executable, str(oracles / "make_oracles.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(NAMES)
    for folder in tmp_path.iterdir():
        if folder.name not in ("qwen3_moe_bf16", "qwen3_5_moe_vl"):  # numpy has no bfloat16
            for shard in folder.glob("*.safetensors"):
                ours, again = load_file(oracles / folder.name / shard.name), load_file(shard)
                assert all(np.array_equal(ours[tensor], again[tensor]) for tensor in ours.keys() | again.keys())
        with np.load(oracles / folder.name / "ref.npz") as ours, np.load(folder / "ref.npz") as again:
            assert set(ours) == set(again)
            for key in ours:
                np.testing.assert_allclose(again[key], ours[key], atol=1e-5)


@pytest.mark.oracle
def test_an_unknown_name_is_refused(oracles, tmp_path):
    command = [sys.executable, str(oracles / "make_oracles.py"), "--out", str(tmp_path), "--only", "gpt2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no oracle is called 'gpt2'" in done.stderr


@pytest.mark.oracle
def test_the_script_makes_the_folders_in_codes_again(oracles, tmp_path):
    command = [sys.executable, str(oracles / "make_coded_oracles.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(CODED)
    for folder in tmp_path.iterdir():
        ours = oracles / folder.name
        assert (folder / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
        with np.load(ours / "ref.npz") as kept, np.load(folder / "ref.npz") as again:
            for key in kept:
                np.testing.assert_allclose(again[key], kept[key], atol=1e-5)
