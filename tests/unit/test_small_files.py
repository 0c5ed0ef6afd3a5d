"""Files that people name are read as far as such files may be long, whatever the system says of their size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.errors import UsageError
from tierd.fleet.fleet_file import read_fleet
from tierd.policy.trace import load_trace
from tierd.settings import ServeSettings
from tierd.small_files import read_at_most

ENDLESS = Path("/dev/zero")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_at_most(file, 5) == b"12345"
    for path in (file, ENDLESS):
        with pytest.raises(OSError, match=f"more than 4 bytes: '{path}'"):
            read_at_most(path, 4)


def test_settings_without_an_end_are_refused():
    with pytest.raises(UsageError, match="/dev/zero: cannot be read as settings"):
        ServeSettings.load(config=ENDLESS, table="serve", flags={})
    with pytest.raises(UsageError, match="/dev/zero: cannot be read as a trace: it is no file"):
        load_trace(ENDLESS)


def test_settings_nested_without_sense_are_refused(tmp_path):
    file = tmp_path / "deep.toml"
    file.write_text("a = " + "[" * 5000)
    with pytest.raises(UsageError, match="cannot be read as settings"):
        ServeSettings.load(config=file, table="serve", flags={})
    with pytest.raises(UsageError, match="cannot be read as a fleet"):
        read_fleet(file)
