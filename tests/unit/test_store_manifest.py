"""The manifest as untrusted text: whatever it says, it is a manifest or a clear refusal."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import StoreDamaged, UsageError
from tierd.store.manifest import Manifest, compute_fingerprint, parse_manifest
from tierd.store.synthetic import make_store


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("manifest") / "s",
        layers=2,
        experts=3,
        top_k=1,
        format="int8",
        fill="sparse",
        dense={"a": np.zeros((2, 3), np.float32)},
        config={"model_type": "toy"},
    )
    return (store.path / "store.json").read_text()


def signed(table):
    """The text of a manifest with this content and the fingerprint that belongs to it."""
    manifest = Manifest.model_validate(table)
    return manifest.model_copy(update={"fingerprint": compute_fingerprint(manifest)}).to_json()


def places(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def test_a_manifest_survives_its_text(text):
    manifest = parse_manifest(text, "store.json")
    assert manifest.to_json() == text
    assert parse_manifest(signed(json.loads(text)), "again") == manifest


@given(st.data())
def test_no_changed_value_passes_for_the_original(text, data):
    table = json.loads(text)
    *path, last = data.draw(st.sampled_from([place for place in places(table) if place]))
    inner = table
    for key in path:
        inner = inner[key]
    odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
    inner[last] = data.draw(odd)
    with contextlib.suppress(StoreDamaged, UsageError):
        manifest = parse_manifest(json.dumps(table), "store.json")
        original = parse_manifest(text, "store.json")
        # Only the list of text files lies outside the fingerprint; their content is checked when they are read.
        assert manifest.model_copy(update={"files": original.files}) == original


@pytest.mark.parametrize(
    ("place", "value"),
    [("gate", 64), ("gate.scales", 64)],
)
def test_a_layout_that_kernels_would_read_differently_is_refused(text, place, value):
    table = json.loads(text)
    layout = table["geometry"]["layouts"][0]
    layout["record_bytes"] += 4096
    parts = layout["parts"]
    start = [part["name"] for part in parts].index(place)
    for part in parts[start:]:
        part["offset"] += value
    with pytest.raises(StoreDamaged, match="a record layout differs from the one of format int8"):
        parse_manifest(signed(table), "store.json")


def test_a_format_that_does_not_fit_the_layouts_is_refused(text):
    with pytest.raises(StoreDamaged, match="differs from the one of format f32"):
        parse_manifest(signed(json.loads(text) | {"expert_format": "f32"}), "store.json")


def test_a_store_names_the_oldest_version_that_can_express_it(text, tmp_path):
    table = json.loads(text)
    assert table["format_version"] == 1
    assert all("activation" not in layout for layout in table["geometry"]["layouts"])
    options = {"layers": 2, "experts": 2, "top_k": 1, "fill": "sparse"}
    newer = (
        {"format": "mxfp4"}, {"format": ["bf16", "int8"]}, {"biases": True}, {"activation": "gpt-oss"},
    )  # fmt: skip
    for number, more in enumerate(newer):
        store = make_store(tmp_path / str(number), **options, **more)
        assert store.manifest.format_version == 2
        again = parse_manifest((store.path / "store.json").read_text(), "store.json")
        assert again == store.manifest
        older = json.loads(again.to_json()) | {"format_version": 1}
        with pytest.raises(StoreDamaged, match=r"format_version 1|differs from the one"):
            parse_manifest(json.dumps(older), "store.json")


def test_layouts_that_differ_are_each_held_to_their_own_format(tmp_path):
    store = make_store(
        tmp_path / "s", layers=3, experts=2, top_k=1, fill="sparse", format=["fp8-e4m3", "int4-g32", "fp8-e4m3"]
    )
    assert store.manifest.expert_format == "fp8-e4m3"
    assert [store.layout(layer).format for layer in range(3)] == ["fp8-e4m3", "int4-g32", "fp8-e4m3"]
    table = json.loads((store.path / "store.json").read_text())
    layouts = table["geometry"]["layouts"]
    layouts[0]["format"], layouts[1]["format"] = layouts[1]["format"], layouts[0]["format"]
    with pytest.raises(StoreDamaged, match="a record layout differs from the one of format int4-g32"):
        parse_manifest(signed(table), "store.json")
    table["geometry"]["layouts"] = [layout | {"format": "mxfp4"} for layout in layouts]
    with pytest.raises(StoreDamaged, match="format fp8-e4m3"):
        parse_manifest(signed(table), "store.json")
