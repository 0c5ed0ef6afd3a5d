from __future__ import annotations

import json

import pytest

from tierd.checkpoint.plan import plan_conversion
from tierd.commands import convert, integrations
from tierd.errors import UnsupportedModel, UsageError


@pytest.fixture
def checkpoint(tmp_path):
    def folder(model_type):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return tmp_path

    return folder


def without_torch(package):
    return None if package in ("torch", "transformers") else package


def test_a_family_with_a_mapping_is_converted_by_it(checkpoint):
    assert convert._planner(checkpoint("olmoe"), "auto") is plan_conversion
    assert convert._planner(checkpoint("nobody_knows"), "mapping") is plan_conversion


def test_an_unknown_family_is_refused_where_transformers_is_not_installed(checkpoint, monkeypatch):
    monkeypatch.setattr(integrations, "find_spec", without_torch)
    with pytest.raises(UnsupportedModel, match="unknown model_type 'nobody_knows'") as refused:
        convert._planner(checkpoint("nobody_knows"), "auto")
    assert "With the extra `torch`" in refused.value.hint
    with pytest.raises(UsageError, match="torch is not installed"):
        convert._planner(checkpoint("olmoe"), "transformers")


def test_rules_that_nobody_has_are_refused(checkpoint):
    with pytest.raises(UsageError, match="--by 'guess'"):
        convert._planner(checkpoint("olmoe"), "guess")
