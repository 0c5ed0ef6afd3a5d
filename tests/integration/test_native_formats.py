"""Whole models in the codes they are published in: the bits of the same weights as float32, whatever runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracles.quantise_folder import configuration, quantise, read_folder, write_folder

from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import read_reference
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"
FOLDERS = ["deepseek_v3_fp8", "gpt_oss_mxfp4", "kimi_k2_int4"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Each folder as published and as float32, converted once."""
    made = {}

    def store(folder, form):
        if (folder, form) not in made:
            path = tmp_path_factory.mktemp(folder) / form
            convert(ORACLES / folder, path, experts=form, dense=form)
            made[folder, form] = ExpertStore.open(path)
        return made[folder, form]

    return store


def logits_of(store, *, slots, steps=6, **options):
    """Logits of a prompt in two chunks and of some tokens behind it."""
    folder = next(path for path in ORACLES.glob("*/ref.npz") if path.parent.name == store.path.parent.name[:-1])
    reference = read_reference(folder)
    with Model(InProcess(store, budget=slots * store.geometry.slot_bytes), ModelOptions(**options)) as model:
        sequence = model.cache.take()
        chunks = (reference.input_ids[:17], reference.input_ids[17:])
        rows = [model.extend(sequence, c, phase=Phase.PREFILL, logits_of=range(len(c))) for c in chunks]
        rows += [model.extend(sequence, [token], phase=Phase.DECODE) for token in reference.greedy[:steps]]
    return np.concatenate(rows)


@pytest.mark.parametrize("folder", FOLDERS)
def test_codes_give_the_bits_of_their_values(folder, stores):
    native = logits_of(stores(folder, "native"), slots=3, threads=1, execution="ops")
    wide = logits_of(stores(folder, "f32"), slots=6, threads=2)
    assert native.tobytes() == wide.tobytes()


@pytest.mark.parametrize("folder", FOLDERS)
def test_fast_numerics_stay_close_and_do_not_depend_on_how_they_run(folder, stores):
    exact = logits_of(stores(folder, "native"), slots=6, threads=2)
    fast = logits_of(stores(folder, "native"), slots=6, threads=2, numerics="fast")
    again = logits_of(stores(folder, "native"), slots=3, threads=1, numerics="fast", execution="ops")
    assert fast.tobytes() == again.tobytes()
    distance = np.linalg.norm(fast - exact) / np.linalg.norm(exact)
    if folder == "deepseek_v3_fp8":  # these codes are no whole numbers: both numerics compute alike
        assert distance == 0
    else:
        assert 0 < distance < 0.03


def test_layers_in_different_formats_run_in_one_step(tmp_path):
    source = ORACLES / "qwen3_moe"
    config = json.loads((source / "config.json").read_text())
    codes, values = quantise(read_folder(source), "int4", "f32")
    plain = {name for name in values if name.startswith("model.layers.2.")}
    mixed = {name: entry for name, entry in codes.items() if not name.startswith("model.layers.2.")}
    mixed |= {name: values[name] for name in plain}
    write_folder(tmp_path / "mixed", source, mixed, config | {"quantization_config": configuration("int4", "f32")})
    write_folder(tmp_path / "values", source, values, config)
    for name, form in (("mixed", "native"), ("values", "f32")):
        convert(tmp_path / name, tmp_path / "qwen3_moe1" / form, experts=form, dense=form)
    mixed_store, values_store = (ExpertStore.open(tmp_path / "qwen3_moe1" / form) for form in ("native", "f32"))
    formats = [mixed_store.layout(layer).format for layer in (1, 2)]
    assert formats == ["int4-g32", "f32"]
    native = logits_of(mixed_store, slots=60, threads=2)
    assert native.tobytes() == logits_of(values_store, slots=60, threads=1).tobytes()
    assert native.tobytes() == logits_of(mixed_store, slots=4, threads=1, execution="layers").tobytes()
