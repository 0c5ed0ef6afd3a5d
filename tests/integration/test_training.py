# ruff: noqa: PLC0415  (torch is imported where it is needed: this file is collected without it, too)
from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from compute_node import embedded
from compute_node.training.__main__ import run as run_command
from tierd.errors import StoreDamaged, UsageError


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with two small books of the same few words."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    for name in ("one.txt", "two.txt"):
        drawn = words.choices(["the", "tier", "expert", "reads", "a", "page", "slowly", "then", "on."], k=20_000)
        (folder / name).write_text(" ".join(drawn))
    return folder


@pytest.fixture(scope="module")
def shape():
    from compute_node.training.model import Shape

    return Shape(
        vocabulary=280, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, experts=6, top_k=2, inner=16,
        context=32, positions=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    import torch

    from compute_node.training.train import Recipe

    torch.set_num_threads(1)
    return Recipe(batch=4, warmup=5, report_every=10, held_out_windows=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, shape, recipe):
    """The output folder of forty steps, what was told, and the last held-out perplexity."""
    from compute_node.training.train import Budget, train

    out = tmp_path_factory.mktemp("trained")
    told = []
    perplexity = train(text, out, Budget(steps=40), shape=shape, recipe=recipe, tell=told.append)
    return out, told, perplexity


@pytest.mark.oracle
def test_training_lowers_the_held_out_perplexity(trained):
    _, told, perplexity = trained
    assert perplexity < 0.2 * 280
    assert sum("tokens/s" in line for line in told) == 4


@pytest.mark.oracle
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, text, shape, recipe, trained):
    import torch

    from compute_node.training.train import Budget, Run, prepare, train

    budget = Budget(steps=40)
    (tmp_path / "checkpoint").mkdir()
    corpus = prepare(text, tmp_path, shape)
    run = Run(shape, recipe)
    for step in range(17):
        run.advance(corpus.train, budget.done(step, 0.0))
    run.save(tmp_path / "state.pt")
    told = []
    assert train(text, tmp_path, budget, shape=shape, recipe=recipe, tell=told.append) == trained[2]
    assert told[0].startswith("resumed after step 17")
    whole, stopped = (torch.load(out / "state.pt", weights_only=True) for out in (trained[0], tmp_path))
    assert whole["step"] == stopped["step"] == 40
    assert all(torch.equal(whole["model"][name], stopped["model"][name]) for name in whole["model"])


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")  # transformers' own warnings are not under test
@pytest.mark.parametrize("which", ["trained", "embedded"])
def test_transformers_loads_the_export_and_computes_the_same(which, trained):
    import torch
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    from compute_node.training.export import load_model

    folder = trained[0] / "checkpoint" if which == "trained" else embedded.path()
    theirs, loading = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values())
    ours = load_model(folder)
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)("the tier reads a page slowly")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs.eval()(input_ids=ids).logits, atol=5e-5, rtol=0)


@pytest.mark.oracle
def test_the_training_module_agrees_with_the_reference_of_the_embedded_model(request):
    import torch

    from compute_node.training.export import load_model

    model = load_model(embedded.path())
    with np.load(request.config.rootpath / "tests" / "oracles" / "embedded.npz") as oracle:
        for number in range(3):
            ids = np.concatenate([oracle[f"prompt_{number}"], oracle["greedy"][number]])
            with torch.no_grad():
                logits = model(torch.from_numpy(ids)[None])[0].numpy()
            first = len(oracle[f"prompt_{number}"]) - 1
            np.testing.assert_allclose(logits[first], oracle["logits"][number], atol=1e-4)
            assert np.array_equal(logits[first:-1].argmax(-1), oracle["greedy"][number])


@pytest.mark.oracle
def test_an_evaluation_counts_every_choice(trained):
    from compute_node.training.corpus import Corpus
    from compute_node.training.evaluate import evaluate
    from compute_node.training.export import load_model

    corpus = Corpus.load(trained[0] / "tokens.npz")
    model = load_model(trained[0] / "checkpoint")
    model.shape = replace(model.shape, context=32)
    result = evaluate(model, corpus.held_out)
    assert result.tokens == (len(corpus.held_out) - 1) // 32 * 32
    np.testing.assert_allclose(result.use.sum(1), 1.0)
    assert np.all((result.repeated >= 0) & (result.repeated <= 1))


@pytest.mark.oracle
def test_a_state_of_other_sizes_or_with_damage_is_refused(tmp_path, text, shape, recipe):
    from compute_node.training.train import Budget, Run, train

    Run(replace(shape, layers=1), recipe).save(tmp_path / "state.pt")
    with pytest.raises(UsageError, match="other sizes"):
        train(text, tmp_path, Budget(steps=1), shape=shape, recipe=recipe, tell=str)
    (tmp_path / "state.pt").write_bytes(b"not a state")
    with pytest.raises(StoreDamaged, match=r"state\.pt"):
        train(text, tmp_path, Budget(steps=1), shape=shape, recipe=recipe, tell=str)


@pytest.mark.oracle
def test_a_damaged_checkpoint_is_refused(tmp_path, trained):
    from compute_node.training.export import load_model

    folder = shutil.copytree(trained[0] / "checkpoint", tmp_path / "copy")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(StoreDamaged, match=shard.name):
        load_model(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="not a checkpoint folder"):
        load_model(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minutes", "0"], "more than zero"),
        (["--steps", "-3"], "more than zero"),
        (["--minutes", "1", "--threads", "0"], "at least 1"),
        ([], "required"),
    ],
)
def test_wrong_options_are_refused_in_one_line(tmp_path, options, said):
    command = [sys.executable, "-m", "compute_node.training", "--out", str(tmp_path / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_torch_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="needs torch") as caught:
        run_command(Namespace(held_out=None))
    assert "[train]" in caught.value.hint


@pytest.mark.oracle
def test_the_command_line_trains_and_goes_on(tmp_path, text):
    command = [sys.executable, "-m", "compute_node.training", "--out", str(tmp_path), "--text", str(text)]
    for steps in ("1", "2"):
        done = subprocess.run([*command, "--steps", steps], capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
    assert "resumed after step 1" in done.stdout
    assert (tmp_path / "checkpoint" / "model.safetensors.index.json").exists()
