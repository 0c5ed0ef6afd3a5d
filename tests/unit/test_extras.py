"""What to type where an optional package is missing: a command that works as it stands."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PathDistribution

import pytest

from tierd import extras


def installed(folder, record):
    """A distribution whose record of where it came from is this text."""
    info = folder / "tierd-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: tierd\nVersion: 0\n")
    if record is not None:
        (info / "direct_url.json").write_text(record)
    return PathDistribution(info)


@pytest.mark.parametrize("editable", [True, False])
def test_the_folder_that_it_came_from_is_installed_again_in_the_same_way(tmp_path, monkeypatch, editable):
    source = tmp_path / "my tierd"
    source.mkdir()
    (source / "pyproject.toml").touch()
    record = json.dumps({"url": source.as_uri(), "dir_info": {"editable": editable}})
    monkeypatch.setattr(extras, "distributions", lambda **_: [installed(tmp_path, record)])
    command = shlex.split(extras.install_hint("torch").partition(": ")[2])
    assert command == [sys.executable, "-m", "pip", "install", *["-e"] * editable, f"{source}[torch]"]


@pytest.mark.parametrize("record", [None, "{", "{}", '{"url": "file:///gone"}', '{"url": "https://example.org/t.whl"}'])
def test_without_that_folder_the_package_is_named(tmp_path, monkeypatch, record):
    monkeypatch.setattr(extras, "distributions", lambda **_: [installed(tmp_path, record)])
    assert extras.install_hint("ray").endswith("pip install 'tierd[ray]'")
