"""Twins in a checkpoint, which only rounding can tell apart, are near-ties; other differences are errors."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from oracles import make_oracles
from safetensors.numpy import load_file, save_file

from compute_node.engine.double_run import double_run
from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.near_ties import EQUAL, ERROR, NEAR_TIE, judge
from compute_node.engine.oracle import compare, read_reference
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.store.store import ExpertStore

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("oracles")
    make_oracles.torch.set_num_threads(1)
    make_oracles.make("olmoe", make_oracles.ORACLES["olmoe"], root, seed=2)
    return root / "olmoe"


def changed(folder, to, tensors, arrays):
    """A copy of the folder with some of its tensors and of its reference's arrays replaced."""
    to.mkdir()
    for name in ("config.json", "generation_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    save_file(load_file(folder / "model.safetensors") | tensors, to / "model.safetensors", metadata={"format": "pt"})
    with np.load(folder / "ref.npz") as reference:
        np.savez(to / "ref.npz", **(dict(reference) | arrays))
    return to


def judged(folder, scratch, *, float64):
    """The verdict on a folder."""
    reference = read_reference(folder / "ref.npz")
    convert(folder, scratch / "store", experts="f32", dense="f32")
    with Model(InProcess(ExpertStore.open(scratch / "store")), ModelOptions(threads=1)) as model:
        result = compare(model, reference)
    return judge(reference, result, double_run(folder, reference) if float64 else None)


def twin_tokens(folder):
    """The first greedy token and one behind it in the vocabulary get the same embedding and the same logit."""
    weights, reference = load_file(folder / "model.safetensors"), dict(np.load(folder / "ref.npz"))
    first = int(reference["greedy"][0])
    used = {*reference["greedy"].tolist(), *reference["input_ids"].ravel().tolist()}
    twin = next(token for token in range(first + 1, len(weights["lm_head.weight"])) if token not in used)
    tensors = {name: weights[name].copy() for name in ("lm_head.weight", "model.embed_tokens.weight")}
    arrays = {name: reference[name].copy() for name in ("logits", "greedy", "greedy_logits")}
    for value in tensors.values():
        value[twin] = value[first]
    for name in ("logits", "greedy_logits"):
        arrays[name][..., twin] = arrays[name][..., first]
    arrays["greedy"][0] = twin
    return tensors, arrays


def test_the_same_tokens_and_routes_are_equal_and_near_float64(folder, tmp_path):
    verdict = judged(folder, tmp_path, float64=True)
    assert verdict.kind == EQUAL
    assert 0 < verdict.model_distance < 1e-5
    assert 0 < verdict.reference_distance < 1e-5


def test_another_token_with_the_same_logit_is_a_near_tie(folder, tmp_path):
    twins = changed(folder, tmp_path / "twins", *twin_tokens(folder))
    command = [sys.executable, "-m", "compute_node", "check-oracle", twins, "--in-process", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["greedy_match"], found["passed"]) == ("near-tie", False, False)
    assert "float64" in found["judged_by"]
    assert "greedy token 0" in found["differences"][0]["what"]
    assert judged(twins, tmp_path, float64=False).kind == NEAR_TIE


def test_another_expert_with_the_same_row_in_the_router_is_a_near_tie(folder, tmp_path):
    weights, reference = load_file(folder / "model.safetensors"), dict(np.load(folder / "ref.npz"))
    routes = reference["route_idx_1"].copy()
    expert = int(routes[5, 0])
    twin = next(other for other in range(expert + 1, 12) if not (routes == other).any(axis=1)[5])
    prefix = "model.layers.1.mlp"
    router = weights[f"{prefix}.gate.weight"].copy()
    router[twin] = router[expert]
    tensors = {f"{prefix}.gate.weight": router}
    for part in ("gate", "up", "down"):
        tensors[f"{prefix}.experts.{twin}.{part}_proj.weight"] = weights[
            f"{prefix}.experts.{expert}.{part}_proj.weight"
        ]
    made = changed(folder, tmp_path / "twins", tensors, {})
    remake(made)
    again = dict(np.load(made / "ref.npz"))
    routes = again["route_idx_1"].copy()
    alone = np.flatnonzero((routes == expert).any(axis=1) ^ (routes == twin).any(axis=1))
    assert len(alone) > 0, "no token goes to one of the twins only"
    row = routes[alone[0]]
    row[:] = np.sort(np.where(row == expert, twin, np.where(row == twin, expert, row)))
    np.savez(made / "ref.npz", **(again | {"route_idx_1": routes}))
    assert judged(made, tmp_path, float64=True).kind == NEAR_TIE
    verdict = judged(made, tmp_path / "again", float64=False)
    assert verdict.kind == ERROR
    assert "a float64 run would say" in verdict.differences[0].text


def test_another_token_or_expert_is_an_error_in_float64_too(folder, tmp_path):
    reference = dict(np.load(folder / "ref.npz"))
    routes = reference["route_idx_0"].copy()
    routes[3] = np.sort((routes[3] + 1) % 12)
    verdict = judged(changed(folder, tmp_path / "routes", {}, {"route_idx_0": routes}), tmp_path, float64=True)
    assert verdict.kind == ERROR
    assert "layer 0, token 3" in verdict.differences[0].text


def remake(folder):
    """Computes the reference of a folder again, by transformers."""
    model = make_oracles.transformers.OlmoeForCausalLM.from_pretrained(
        folder, dtype=make_oracles.torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    reference = dict(np.load(folder / "ref.npz"))
    ids = make_oracles.torch.from_numpy(reference["input_ids"])
    run = make_oracles.forward(model, ids)
    tokens, rows = make_oracles.decode(model, ids)
    arrays = {"input_ids": ids.numpy(), "logits": run.logits, "greedy": np.array(tokens), "greedy_logits": rows}
    for layer in run.experts:
        arrays |= {f"route_idx_{layer}": run.experts[layer], f"route_w_{layer}": run.weights[layer]}
    np.savez(folder / "ref.npz", **arrays)
