"""Checkpoints published in codes: kept as they are, bit by bit, or taken to the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracles.quantise_folder import quantise_folder, read_folder, write_folder

from tierd.checkpoint.convert import convert
from tierd.checkpoint.outlook import look_ahead
from tierd.checkpoint.plan import plan_conversion
from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.resolve import resolve
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import StoreDamaged, UnsupportedModel, UsageError
from tierd.store.number_formats import E2M1, E4M3, e8m0_to_f32, spread_blocks, spread_groups, unpack_nibbles
from tierd.store.store import ExpertStore

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 160, "intermediate_size": 136, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 80, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
    "vocab_size": 10,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 10,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
    "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
CASES = [
    pytest.param(MIXTRAL, "fp8", "f32", "fp8-e4m3", id="fp8"),
    pytest.param(MIXTRAL, "fp8", "ue8m0", "fp8-e4m3", id="fp8-ue8m0"),
    pytest.param(MIXTRAL, "int4", "f32", "int4-g32", id="int4"),
    pytest.param(GPT_OSS, "mxfp4", "f32", "mxfp4", id="mxfp4"),
]


def make(folder, config, coding, scales="f32", **options):
    """A plain checkpoint, the same in codes, and the values of the codes."""
    make_checkpoint(folder / "plain", config, dtype="F32", **options)
    quantise_folder(folder / "plain", folder / "codes", folder / "values", coding=coding, scales=scales)
    return folder / "codes", folder / "values"


def tensors_of(folder):
    """The tensors of a folder for `write_folder`, whatever their types."""
    checkpoint, found = Checkpoint.open(folder), {}
    kinds = {"F32": "<f4", "BF16": "<u2", "I32": "<u4", "I64": "<i8"}
    for tensor in checkpoint.tensors.values():
        data = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        found[tensor.name] = (tensor.dtype, np.frombuffer(data, kinds.get(tensor.dtype, "u1")).reshape(tensor.shape))
    return found


def rewrite(folder, change, **config):
    """The folder with other tensors or settings."""
    tensors = tensors_of(folder)
    change(tensors)
    write_folder(folder, folder, tensors, json.loads((folder / "config.json").read_text()) | config)


def values_of(store, layer, expert, name):
    """A matrix of a record as float32."""
    layout = store.layout(layer)
    views = layout.views(store.read_record(layer, expert))
    codes, scales = views[name], views.get(f"{name}.scales")
    geometry = store.geometry
    sizes = (geometry.intermediate_size, geometry.hidden_size)
    rows, cols = sizes[::-1] if name == "down" else sizes
    match layout.format:
        case "f32":
            return codes
        case "fp8-e4m3":
            return E4M3[codes] * spread_blocks(scales, rows, cols)
        case "mxfp4":
            return E2M1[unpack_nibbles(codes, cols)] * spread_groups(e8m0_to_f32(scales), cols)
        case _:
            wide = (scales.astype(np.uint32) << 16).view(np.float32)
            return (unpack_nibbles(codes, cols).astype(np.float32) - 8) * spread_groups(wide, cols)


def dense_values(store, name):
    """A dense tensor as float32."""
    tensor = store.read_dense(name)
    match tensor.dtype:
        case "f32":
            return tensor.data
        case "bf16":
            return (tensor.data.astype(np.uint32) << 16).view(np.float32)
        case "i8":
            return tensor.data * tensor.scales[:, None]
        case "fp8":
            return E4M3[tensor.data] * spread_blocks(tensor.scales, *tensor.data.shape)


@pytest.mark.parametrize(("config", "coding", "scales", "stored"), CASES)
def test_native_keeps_every_code_and_scale(tmp_path, config, coding, scales, stored):
    codes, values = make(tmp_path, config, coding, scales)
    convert(codes, tmp_path / "native")
    convert(codes, tmp_path / "f32", experts="f32", dense="f32")
    convert(values, tmp_path / "expected", experts="f32", dense="f32")
    native, wide, expected = (ExpertStore.open(tmp_path / name) for name in ("native", "f32", "expected"))
    assert (native.manifest.expert_format, native.manifest.format_version) == (stored, 2)
    assert native.geometry.expert_bytes < 0.7 * expected.geometry.expert_bytes
    for flat in range(expected.geometry.experts_total):
        layer, expert = expected.geometry.locate(flat)
        assert np.array_equal(wide.read_record(layer, expert), expected.read_record(layer, expert))
        for name in ("gate", "up", "down"):
            assert np.array_equal(values_of(native, layer, expert, name), values_of(expected, layer, expert, name))
    for name in expected.dense_names():
        whole = dense_values(expected, name)
        assert np.array_equal(dense_values(native, name), whole)
        assert np.array_equal(dense_values(wide, name), whole)
    in_codes = {name for name in expected.dense_names() if native.dense_info(name).dtype == "fp8"}
    assert bool(in_codes) == (coding == "fp8")
    assert all("self_attn" in name for name in in_codes)


@pytest.mark.parametrize(("config", "coding", "scales", "stored"), CASES)
def test_codes_can_be_converted_to_other_formats_like_their_values(tmp_path, config, coding, scales, stored):
    codes, values = make(tmp_path, config, coding, scales)
    for experts, dense in (("int4-g64", "int8"), ("bf16", "bf16")):
        convert(codes, tmp_path / f"codes-{experts}", experts=experts, dense=dense)
        convert(values, tmp_path / f"values-{experts}", experts=experts, dense=dense)
        one, other = (ExpertStore.open(tmp_path / f"{name}-{experts}") for name in ("codes", "values"))
        assert np.array_equal(one.index, other.index)
        for name in one.dense_names():
            assert np.array_equal(dense_values(one, name), dense_values(other, name))
    assert stored in look_ahead(codes).geometry


def test_gate_and_up_of_gpt_oss_are_taken_apart_with_their_biases(tmp_path):
    _, values = make(tmp_path, GPT_OSS, "mxfp4")
    plain = read_folder(values)
    convert(tmp_path / "codes", tmp_path / "store")
    convert(values, tmp_path / "transposed")
    for store in (ExpertStore.open(tmp_path / "store"), ExpertStore.open(tmp_path / "transposed")):
        assert store.layout(1).activation == "gpt-oss"
        prefix = "model.layers.1.mlp.experts"
        both, bias = plain[f"{prefix}.gate_up_proj"][2], plain[f"{prefix}.gate_up_proj_bias"][2]
        views = store.layout(1).views(store.read_record(1, 2))
        for name, first in (("gate", 0), ("up", 1)):
            assert np.array_equal(values_of(store, 1, 2, name), both[:, first::2].T)
            assert np.array_equal(views[f"{name}.bias"], bias[first::2])
        assert np.array_equal(values_of(store, 1, 2, "down"), plain[f"{prefix}.down_proj"][2].T)
        assert np.array_equal(views["down.bias"], plain[f"{prefix}.down_proj_bias"][2])


def test_layers_may_differ_and_stacked_fp8_is_taken_apart(tmp_path):
    config = OLMOE | {"hidden_size": 128, "intermediate_size": 128}
    codes, values = make(tmp_path, config, "fp8")
    plain, prefix = read_folder(values), "model.layers.0.mlp.experts"

    def one_plain_layer_and_one_stacked(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]
        tensors |= {name: ("F32", a) for name, a in plain.items() if name.startswith("model.layers.1.mlp.experts.")}
        for target, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for end in ("", "_scale_inv"):
                kind = tensors[f"{prefix}.0.{parts[0]}.weight{end}"][0]
                whole = [
                    np.concatenate([tensors.pop(f"{prefix}.{e}.{part}.weight{end}")[1] for part in parts])
                    for e in range(4)
                ]
                tensors[f"{prefix}.{target}{end}"] = (kind, np.stack(whole))

    rewrite(codes, one_plain_layer_and_one_stacked)
    convert(codes, tmp_path / "store")
    convert(values, tmp_path / "expected")
    store, expected = ExpertStore.open(tmp_path / "store"), ExpertStore.open(tmp_path / "expected")
    assert [store.layout(layer).format for layer in (0, 1)] == ["fp8-e4m3", "f32"]
    for layer in (0, 1):
        for expert in range(4):
            for name in ("gate", "up", "down"):
                assert np.array_equal(values_of(store, layer, expert, name), values_of(expected, layer, expert, name))


def test_experts_of_one_layer_in_different_ways_need_a_choice(tmp_path):
    codes, values = make(tmp_path, OLMOE, "int4")
    plain, prefix = read_folder(values), "model.layers.1.mlp.experts.2.up_proj"

    def one_plain(tensors):
        for end in ("packed", "scale", "shape"):
            del tensors[f"{prefix}.weight_{end}"]
        tensors[f"{prefix}.weight"] = ("F32", plain[f"{prefix}.weight"])

    rewrite(codes, one_plain)
    checkpoint = Checkpoint.open(codes)
    with pytest.raises(UnsupportedModel, match=r"layer 1: .*int4, plain"):
        plan_conversion(checkpoint, experts="native", dense="native", shard_bytes=1 << 30)
    convert(codes, tmp_path / "f32", experts="f32")
    convert(values, tmp_path / "expected", experts="f32")
    assert np.array_equal(ExpertStore.open(tmp_path / "f32").index, ExpertStore.open(tmp_path / "expected").index)


def test_wider_groups_are_spread_over_groups_of_32(tmp_path):
    codes, _ = make(tmp_path, OLMOE, "int4")

    def first_scale_of_two(tensors):
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[name] = ("BF16", np.ascontiguousarray(tensors[name][1][:, ::2]))

    config = json.loads((codes / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["group_size"] = 64
    rewrite(codes, first_scale_of_two, quantization_config=config)
    convert(codes, tmp_path / "store")
    store = ExpertStore.open(tmp_path / "store")
    scales = store.layout(0).views(store.read_record(0, 1))["gate.scales"]
    source = tensors_of(codes)["model.layers.0.mlp.experts.1.gate_proj.weight_scale"][1]
    assert np.array_equal(scales[:, :2], np.repeat(source, 2, axis=1))


def test_a_conversion_of_codes_that_was_stopped_goes_on_to_the_same_bytes(tmp_path):
    codes, _ = make(tmp_path, MIXTRAL, "fp8")
    options = {"shard_bytes": 100_000}
    convert(codes, tmp_path / "whole", **options)

    class Stopped(Exception):
        pass

    def stop(state):
        if state.shard > 3:
            raise Stopped

    with pytest.raises(Stopped):
        convert(codes, tmp_path / "parts", progress=stop, **options)
    report = convert(codes, tmp_path / "parts", **options)
    assert report.resumed_shards >= 2
    assert report.fingerprint == ExpertStore.open(tmp_path / "whole").fingerprint


@pytest.mark.parametrize(
    ("coding", "change", "message"),
    [
        ("fp8", {"weight_block_size": None}, "weight_block_size is None"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ("fp8", {"fmt": "e5m2"}, "fmt is e5m2"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme is static"),
        ("fp8", {"surprise": 1}, "surprise is 1"),
        ("fp8", {"quant_method": "fp5"}, "not known: 'fp5'"),
        ("int4", {"format": "int-quantized"}, "format is int-quantized"),
        ("int4", {"config_groups": {}}, "config_groups"),
        ("int4", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(tmp_path, coding, change, message):
    codes, _ = make(tmp_path, OLMOE, coding)
    config = json.loads((codes / "config.json").read_text())
    config["quantization_config"] |= change
    (codes / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        resolve(Checkpoint.open(codes))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("symmetric", False), ("group_size", 48), ("strategy", "channel"), ("actorder", "group")],
)
def test_packed_weights_of_another_kind_are_refused_by_name(tmp_path, key, value):
    codes, _ = make(tmp_path, OLMOE, "int4")
    config = json.loads((codes / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    (codes / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=rf"group_0\.weights\.{key} is {value}"):
        resolve(Checkpoint.open(codes))


@pytest.mark.parametrize("coding", ["fp8", "int4"])
def test_codes_that_the_config_does_not_mention_are_refused(tmp_path, coding):
    codes, _ = make(tmp_path, OLMOE, coding)
    config = json.loads((codes / "config.json").read_text())
    del config["quantization_config"]
    (codes / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=rf"holds {coding} codes; quantization_config"):
        resolve(Checkpoint.open(codes))


def test_missing_doubled_and_damaged_codes_are_refused(tmp_path):
    codes, values = make(tmp_path / "int4", OLMOE, "int4")
    name = "model.layers.1.mlp.experts.3.down_proj"
    rewrite(codes, lambda tensors: tensors.pop(f"{name}.weight_scale"))
    with pytest.raises(StoreDamaged, match=rf"1 missing: {name}\.weight_scale"):
        resolve(Checkpoint.open(codes))
    whole = {f"{name}.weight": ("F32", read_folder(values)[f"{name}.weight"])}
    rewrite(codes, lambda tensors: tensors.update(whole))
    with pytest.raises(StoreDamaged, match="there twice"):
        resolve(Checkpoint.open(codes))
    codes, _ = make(tmp_path / "fp8", OLMOE, "fp8")
    infinite = {f"{name}.weight_scale_inv": ("F32", np.full((1, 1), np.inf, np.float32))}
    rewrite(codes, lambda tensors: tensors.update(infinite))
    with pytest.raises(StoreDamaged, match=rf"{name}\.weight_scale_inv has a scale that is no finite number"):
        convert(codes, tmp_path / "store")


def test_a_published_format_cannot_be_made_and_is_the_default_of_its_own_plan(tmp_path):
    codes, values = make(tmp_path, OLMOE, "fp8")
    with pytest.raises(UsageError, match="--experts 'mxfp4' is not known"):
        convert(values, tmp_path / "store", experts="mxfp4")
    published, plain = look_ahead(codes), look_ahead(values)
    assert (published.native, plain.native) == ("fp8-e4m3", None)
    assert set(published.geometry) - set(plain.geometry) == {"fp8-e4m3"}
    convert(codes, tmp_path / "store")
    store = ExpertStore.open(tmp_path / "store")
    assert published.geometry["fp8-e4m3"].expert_bytes == store.geometry.expert_bytes
    assert Path(store.path / "config.json").read_bytes() == (codes / "config.json").read_bytes()


def test_heads_for_drafting_keep_their_codes_though_nothing_runs_them(tmp_path):
    source = Path(__file__).parents[1] / "oracles" / "deepseek_v3_fp8"
    tensors, config = tensors_of(source), json.loads((source / "config.json").read_text())
    drafting = {
        name.replace("layers.1.", "layers.2."): entry
        for name, entry in tensors.items()
        if "layers.1.mlp.experts.0." in name
    }
    drafting["model.layers.2.eh_proj.weight"] = ("BF16", np.full((136, 272), 0x3F80, np.uint16))
    write_folder(tmp_path / "m", source, tensors | drafting, config | {"num_nextn_predict_layers": 1})
    convert(tmp_path / "m", tmp_path / "store")
    store = ExpertStore.open(tmp_path / "store")
    kept = {name: store.dense_info(name).dtype for name in store.dense_names() if "layers.2." in name}
    assert set(kept) == {name for name in drafting if not name.endswith("_scale_inv")}
    assert kept.pop("model.layers.2.eh_proj.weight") == "bf16"
    assert set(kept.values()) == {"fp8"}
    name = "model.layers.2.mlp.experts.0.up_proj.weight"
    assert np.array_equal(store.read_dense(name).data, drafting[name][1])
    assert np.array_equal(store.read_dense(name).scales, drafting[f"{name}_scale_inv"][1])
