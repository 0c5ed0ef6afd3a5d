"""Every family against what transformers computed, with experts read by the node itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from oracles.families import CODERS, FOLDERS, measure, table

from compute_node import embedded
from compute_node.commands.families import known_families
from compute_node.engine.generate import GenerationParams, Generator
from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import OracleReference, compare, read_reference
from compute_node.models.registry import FAMILIES, family_of
from compute_node.text.tokenizer import Tokenizer
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"


def open_model(folder, scratch, *, slots=None, **options):
    store = scratch / "store"
    convert(folder, store, experts="native", dense="native")
    opened = ExpertStore.open(store)
    budget = None if slots is None else slots * opened.geometry.slot_bytes
    return Model(InProcess(opened, budget=budget), ModelOptions(**({"threads": 1} | options)))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each folder gives, run once."""
    return cache(lambda name: measure(name, tmp_path_factory.mktemp(name)))


def test_all_families_have_oracles():
    known = {family_of(json.loads((ORACLES / name / "config.json").read_text()))[0].model_type for name in FOLDERS}
    assert {FAMILIES[model_type] for model_type in known} == set(FAMILIES.values())


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_tokens_and_routes_are_those_of_transformers(name, measured):
    result = measured(name).result
    assert result.max_logit_error < 1e-5
    assert result.max_route_weight_error < 1e-5
    assert result.greedy_equal == 16
    assert result.routes_equal
    assert result.passed


def test_the_table_of_families_is_what_was_measured(measured):
    rows = table({name: measured(name) for name in FOLDERS})
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    assert known_families() == rows, "python tests/oracles/families.py writes the table"
    readme = (ORACLES.parents[1] / "README.md").read_text().splitlines()
    for row in rows:
        (line,) = (line for line in readme if line.startswith(f"| {row['name']} | "))
        assert f" {row['max_logit_error']:.1e} " in line
        assert all(code in line for code in row["formats"] if code not in CODERS)


@pytest.mark.parametrize("wrong", ["logits", "greedy", "routes", "route_weights", "shape"])
def test_a_reference_that_differs_fails_the_comparison(wrong, tmp_path):
    reference = read_reference(ORACLES / "olmoe" / "ref.npz")
    if wrong == "logits":
        reference.logits[3, 5] += 1e-3
    elif wrong == "shape":
        reference = OracleReference(
            reference.input_ids, reference.logits[:, :-1], reference.greedy, None, reference.routes, {}
        )
    elif wrong == "greedy":
        reference.greedy[8] ^= 1
    elif wrong == "routes":
        reference.routes[1][0, 0] ^= 1
    else:
        reference.route_weights[0][2, 1] = float("nan")
    with open_model(ORACLES / "olmoe", tmp_path) as model:
        assert not compare(model, reference).passed


def test_the_embedded_model_writes_the_tokens_of_transformers(tmp_path):
    reference = np.load(ORACLES / "embedded.npz")
    with open_model(embedded.path(), tmp_path, slots=40, threads=2) as model:
        generator = Generator(model, Tokenizer.from_store(model.source.store))
        for place, text in enumerate(reference["texts"]):
            prompt = generator.tokenizer.encode(str(text))
            assert prompt == reference[f"prompt_{place}"].tolist()
            logits = model.extend(sequence := model.cache.take(), prompt, phase=Phase.PREFILL)
            model.cache.give_back(sequence)
            assert np.abs(logits[0] - reference["logits"][place]).max() < 1e-4
            *_, finished = generator.generate(prompt, GenerationParams(max_tokens=64, ignore_eos=True))
            assert list(finished.token_ids) == reference["greedy"][place].tolist()


def test_a_folder_without_a_reference_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"ref\.npz"):
        read_reference(tmp_path / "ref.npz")
    (tmp_path / "ref.npz").write_bytes(b"no archive")
    with pytest.raises(UsageError, match="not a reference"):
        read_reference(tmp_path / "ref.npz")
    np.savez(tmp_path / "ref.npz", input_ids=np.zeros((1, 2)))
    with pytest.raises(UsageError, match="not a reference"):
        read_reference(tmp_path / "ref.npz")
