from __future__ import annotations

import json

import numpy as np
import pytest

from compute_node.commands.engine_choice import choose_engine, make_model
from compute_node.settings import NodeSettings
from tierd.client.in_process import InProcess
from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.store.checksums import xxh3
from tierd.store.formats import Activation, DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.index import new_index
from tierd.store.manifest import Interface, InterfaceModule
from tierd.store.records import expert_layout
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store
from tierd.store.writing import ShardWriter, plan_expert_shards, seal_store

SIZES = ((64, 32), (48, 16))


def layouts(**options):
    given = {"activation": Activation.MODEL, "biases": True, "gated": False} | options
    return tuple(expert_layout("bf16", hidden, width, **given) for hidden, width in SIZES)


def made(path, *, interface=True, **options):
    """Two layers of two experts, each layer with sizes of its own, that only the model's own code can run."""
    path.mkdir()
    geometry = Geometry(
        hidden_size=64, intermediate_size=32, top_k=1, layouts=layouts(**options),
        layers=tuple(ExpertLayer(layer=number, experts=2, layout=number) for number in range(2)),
    )  # fmt: skip
    index = new_index(geometry)
    plans = plan_expert_shards(geometry, 1 << 20)
    for number, plan in enumerate(plans):
        index["shard"][plan.flats.start : plan.flats.stop] = number
        index["offset"][plan.flats.start : plan.flats.stop] = [entry.begin for entry in plan.header.tensors.values()]
        with ShardWriter(path / plan.file, plan.header) as writer:
            for flat in plan.flats:
                record = np.full(geometry.layout(geometry.locate(flat)[0]).record_bytes, flat, np.uint8)
                index["xxh3"][flat] = xxh3(record)
                writer.write(record)
            writer.commit()
    modules = tuple(InterfaceModule(layer=n, path=f"h.{n}.experts", has_gate=False, has_bias=True) for n in range(2))
    seal_store(
        path, family="odd", model_type="odd", expert_format=ExpertFormat.BF16, dense_format=DenseFormat.F32,
        geometry=geometry, shards=[plan.shard for plan in plans], index=index,
        interface=Interface(architecture="OddForCausalLM", transformers="5", modules=modules) if interface else None,
    )  # fmt: skip
    return path


def test_a_store_for_the_models_own_code_opens_again_as_it_was_sealed(tmp_path):
    store = ExpertStore.open(made(tmp_path / "store"))
    assert store.manifest.format_version == 2
    assert [module.path for module in store.manifest.interface.modules] == ["h.0.experts", "h.1.experts"]
    assert [store.layout(layer).sizes for layer in (0, 1)] == list(SIZES)
    assert [part.name for part in store.layout(1).parts] == ["up", "up.bias", "down", "down.bias"]
    assert store.layout(1).weights == 2 * 48 * 16
    assert set(store.read_record(1, 1)) == {3}


def test_the_interface_is_part_of_the_fingerprint(tmp_path):
    made(tmp_path / "store")
    path = tmp_path / "store" / "store.json"
    table = json.loads(path.read_text())
    table["interface"]["modules"][0]["path"] = "elsewhere"
    path.write_text(json.dumps(table))
    with pytest.raises(StoreDamaged, match="fingerprint"):
        ExpertStore.open(tmp_path / "store")


@pytest.mark.parametrize(
    ("interface", "options"),
    [(True, {"activation": Activation.SILU}), (False, {}), (False, {"activation": Activation.SILU})],
)
def test_kernels_and_the_models_own_code_do_not_read_each_others_records(tmp_path, interface, options):
    made(tmp_path / "store", interface=interface, **options)
    with pytest.raises(StoreDamaged, match="record layout"):
        ExpertStore.open(tmp_path / "store")


def test_known_families_say_nothing_of_an_interface(tmp_path):
    store = make_store(tmp_path / "store", layers=1, experts=2, top_k=1)
    assert store.manifest.interface is None
    assert "interface" not in json.loads((tmp_path / "store" / "store.json").read_text())


def test_the_engine_follows_from_the_store(tmp_path, monkeypatch):
    odd = ExpertStore.open(made(tmp_path / "odd"))
    assert choose_engine(odd, "auto") == ("transformers", "OddForCausalLM has no native program")
    with pytest.raises(UnsupportedModel, match="OddForCausalLM has no native program"):
        choose_engine(odd, "native")
    monkeypatch.setattr("compute_node.commands.engine_choice.find_spec", lambda _: None)
    with pytest.raises(UnsupportedModel, match="needs torch, which is not installed"):
        make_model(InProcess(odd), NodeSettings(), engine="transformers", serving=False)
