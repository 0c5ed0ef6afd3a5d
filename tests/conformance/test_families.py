"""What every model family must hold, whatever its layers are: bits that do not depend on how a text is computed.

A family joins by an oracle folder (`tests/oracles`). Its reference is compared elsewhere; here a family is compared
with itself: conversion, chunks, batches, tiers, threads, and a cache that is left and taken up again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import read_reference
from compute_node.engine.saved_sequence import restore_sequence, save_sequence
from compute_node.models.registry import FAMILIES, family_of
from tierd.checkpoint.convert import convert
from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.resolve import resolve
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import UnsupportedModel
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"
FOLDERS = sorted(
    path.parent.name
    for path in ORACLES.glob("*/config.json")
    if (path.parent / "model.safetensors").exists()
    and path.parent.name in {"mixtral_sliding", "olmoe", "qwen3_moe"} | set(FAMILIES) - {"mixtral"}
)
LENGTH = 150
"""Tokens: more than two pages of the cache, more than an indexer of the folders lets a row read."""


def test_every_family_is_here():
    known = {json.loads((ORACLES / name / "config.json").read_text())["model_type"] for name in FOLDERS}
    assert {module for model_type, module in FAMILIES.items() if model_type in known} == set(FAMILIES.values())


@pytest.fixture(scope="class", params=FOLDERS)
def folder(request):
    return ORACLES / request.param


@pytest.fixture(scope="class")
def store(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp(folder.name) / "store"
    convert(folder, path, experts="native", dense="native")
    return ExpertStore.open(path)


@pytest.fixture(scope="class")
def model(store):
    with Model(InProcess(store), ModelOptions(threads=1, rows=64, sequences=2)) as model:
        yield model


@pytest.fixture(scope="class")
def tokens(folder):
    prompt = read_reference(folder / "ref.npz").input_ids
    return [(token + 7 * turn) % 128 for turn in range(7) for token in prompt][:LENGTH]


def logits_of(model, tokens, sizes, *, sequence=None):
    """Logits of all tokens, computed in chunks of the given sizes, the last one repeated."""
    taken, rows, start = sequence or model.cache.take(), [], len(sequence.tokens) if sequence else 0
    sizes = list(sizes)
    while start < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = tokens[start : start + size]
        phase = Phase.PREFILL if len(part) > 1 else Phase.DECODE
        rows.append(model.extend(taken, part, phase=phase, logits_of=range(len(part))))
        start += size
    if sequence is None:
        model.cache.give_back(taken)
    return np.concatenate(rows)


@pytest.fixture(scope="class")
def whole(model, tokens):
    logits = logits_of(model, tokens, [64])
    assert np.isfinite(logits).all()
    assert len({row.tobytes() for row in logits}) > LENGTH // 2
    return logits


class TestFamily:
    def test_conversion_loses_nothing(self, folder, store):
        published = load_file(folder / "model.safetensors")
        resolved, layout = resolve(Checkpoint.open(folder)), store.geometry.layouts[0]
        for name, (source, _spec) in resolved.dense.items():
            assert np.array_equal(store.read_dense(name).data, published[source.name])
        sources = iter(resolved.experts)
        for entry in store.geometry.layers:
            for expert in range(entry.experts):
                assert np.array_equal(store.read_record(entry.layer, expert), next(sources).encode(layout))
        assert len(resolved.experts) == store.geometry.experts_total

    @pytest.mark.parametrize("sizes", [[1], [1, 23, 40, 7], [63, 2, 1]], ids=str)
    def test_chunks_change_no_bit(self, model, tokens, whole, sizes):
        assert np.array_equal(logits_of(model, tokens, sizes), whole)

    def test_a_batch_of_sequences_changes_no_bit(self, model, tokens, whole):
        other = [token ^ 1 for token in tokens]
        first, second = model.cache.take(), model.cache.take()
        for start in range(0, LENGTH, 32):
            part = slice(start, min(start + 32, LENGTH))
            count = part.stop - start
            assert all(model.cache.reserve(sequence, count) for sequence in (first, second))
            logits = model.forward(
                np.array([*other[part], *tokens[part]]),
                np.tile(np.arange(start, part.stop), 2),
                [first] * count + [second] * count,
                phase=Phase.PREFILL,
                logits_of=range(2 * count),
            )
            assert np.array_equal(logits[count:], whole[part])
            assert not np.array_equal(logits[:count], whole[part])
            model.cache.advance(first, other[part])
            model.cache.advance(second, tokens[part])
        model.cache.give_back(first)
        model.cache.give_back(second)

    @pytest.mark.parametrize("execution", ["fused", "layers", "ops"])
    def test_one_resident_expert_two_threads_and_every_execution_change_no_bit(self, store, tokens, whole, execution):
        source = InProcess(store, budget=store.geometry.slot_bytes)
        with Model(source, ModelOptions(threads=2, execution=execution)) as model:
            assert np.array_equal(logits_of(model, tokens[:40], [29, 1]), whole[:40])
        assert source.stats.outcomes["miss"] > store.geometry.experts_total

    def test_a_sequence_that_others_interrupt_goes_on_with_the_same_bits(self, model, tokens, whole):
        sequence = model.cache.take()
        logits_of(model, tokens[:100], [64], sequence=sequence)
        logits_of(model, [token ^ 3 for token in tokens], [50])
        assert np.array_equal(logits_of(model, tokens, [25, 1], sequence=sequence), whole[100:])
        model.cache.give_back(sequence)

    def test_a_step_that_was_given_up_leaves_no_trace(self, model, tokens, whole):
        sequence = model.cache.take()
        logits_of(model, tokens[:70], [64], sequence=sequence)
        asked = iter([False, False])
        given_up = model.extend(
            sequence, [5] * 9, phase=Phase.PREFILL, cancelled=lambda: next(asked, True), observe=lambda *_: None
        )
        assert given_up is None
        assert len(sequence.tokens) == 70
        assert np.array_equal(logits_of(model, tokens, [33], sequence=sequence), whole[70:])
        model.cache.give_back(sequence)

    def test_a_saved_sequence_goes_on_elsewhere_with_the_same_bits(self, store, model, tokens, whole):
        sequence = model.cache.take()
        logits_of(model, tokens[:90], [64], sequence=sequence)
        saved = save_sequence(model.cache, sequence)
        model.cache.give_back(sequence)
        with Model(InProcess(store), ModelOptions(threads=1)) as other:
            logits_of(other, [9] * 70, [64])
            there = other.cache.take()
            restore_sequence(other.cache, there, tokens[:90], saved)
            assert np.array_equal(logits_of(other, tokens, [17], sequence=there), whole[90:])

    def test_pages_of_the_same_beginning_are_taken_over_with_the_same_bits(self, model, tokens, whole):
        first = model.cache.begin(tokens, reuse=False)
        logits_of(model, tokens, [64], sequence=first)
        model.cache.give_back(first)
        again = model.cache.begin(tokens)
        known = len(again.tokens)
        assert known == (0 if model.cache.layout.recurrent else 128)
        assert np.array_equal(logits_of(model, tokens, [10], sequence=again), whole[known:])
        model.cache.give_back(again)

    def test_a_setting_that_is_not_known_is_refused_by_name(self, folder):
        config = json.loads((folder / "config.json").read_text())
        inner = config.get("text_config", config)
        inner["hidden_surprise"] = 3
        with pytest.raises(UnsupportedModel, match="hidden_surprise"):
            family_of(config)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_quantised_weights_are_close_and_change_no_bit_with_the_chunks(name, tmp_path):
    rows = []
    prompt = read_reference(ORACLES / name / "ref.npz").input_ids
    for place, (experts, dense) in enumerate((("f32", "f32"), ("int8", "int8"))):
        convert(ORACLES / name, tmp_path / str(place), experts=experts, dense=dense)
        with Model(InProcess(ExpertStore.open(tmp_path / str(place))), ModelOptions(threads=1)) as model:
            rows.append(logits_of(model, prompt, [24]))
            assert np.array_equal(logits_of(model, prompt, [1, 5]), rows[-1])
    plain, quantised = rows
    assert 0 < np.linalg.norm(plain - quantised) < 0.2 * np.linalg.norm(plain)


def test_weights_for_drafting_are_kept_and_change_no_bit(tmp_path):
    source = ORACLES / "deepseek_v3"
    shutil.copytree(source, tmp_path / "m")
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    layer = config["num_hidden_layers"]
    drafting = {
        f"model.layers.{layer}.eh_proj.weight": np.ones((32, 64), np.float32),
        f"model.layers.{layer}.mlp.experts.3.up_proj.weight": np.full((16, 32), 2, np.float32),
    }
    save_file(drafting, tmp_path / "m" / "model-drafting.safetensors")
    prompt, found = read_reference(source / "ref.npz").input_ids, []
    for folder, store in ((source, tmp_path / "plain"), (tmp_path / "m", tmp_path / "store")):
        convert(folder, store, experts="native", dense="native")
        with Model(InProcess(ExpertStore.open(store)), ModelOptions(threads=1)) as model:
            found.append(logits_of(model, prompt, [24]))
    assert np.array_equal(*found)
    for name, weights in drafting.items():
        assert np.array_equal(ExpertStore.open(tmp_path / "store").read_dense(name).data, weights)
