"""A flag goes over the environment, the environment over the file, the file over the default; wrong names are named."""

from __future__ import annotations

import pytest

from tierd.errors import UsageError
from tierd.settings import ServeSettings


@pytest.fixture
def load(tmp_path):
    def run(text=None, **flags):
        config = None
        if text is not None:
            config = tmp_path / "tierd.toml"
            config.write_text(text)
        return ServeSettings.load(config=config, table="serve", flags=flags)

    return run


def test_each_source_goes_over_the_next(load, monkeypatch):
    text = '[serve]\narena = "30%"\ndrain_seconds = 3'
    assert load().arena == "25%"
    assert load(text).arena == "30%"
    monkeypatch.setenv("TIERD_ARENA", "40%")
    assert load(text).arena == "40%"
    assert load(text, arena="50%").arena == "50%"
    settings = load(text, arena=None)
    assert settings.arena == "40%"
    assert settings.drain_seconds == 3


def test_a_file_without_the_table_changes_nothing(load):
    assert load("[node]\nthreads = 3") == load()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\narenas = 1", ["tierd.toml: [serve] has no setting arenas", "Did you mean arena?"]),
        ("[serve]\nbogus = 1", ["no setting bogus", "It knows also, arena, arena_dir, "]),
        ("[serve]\ndrive-threads = 3", ["Did you mean drive_threads?"]),
        ("[serve]\nmax_sessions = 0", ["max_sessions", "--max-sessions", "TIERD_MAX_SESSIONS"]),
        ('[serve]\nkeepalive_seconds = "soon"', ["keepalive_seconds"]),
        ("[serve]\nsession_experts = 0", ["session_experts", "--session-experts", "TIERD_SESSION_EXPERTS"]),
        ("serve = 3", ["[serve]", "table"]),
        ("[serve", ["tierd.toml"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(load, text, words):
    with pytest.raises(UsageError) as refused:
        load(text)
    for word in words:
        assert word in str(refused.value)


def test_a_wrong_environment_variable_is_refused_by_name(load, monkeypatch):
    monkeypatch.setenv("TIERD_LOG_LEVEL", "loud")
    with pytest.raises(UsageError, match="log_level") as refused:
        load()
    assert "TIERD_LOG_LEVEL" in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.toml"):
        ServeSettings.load(config=tmp_path / "nothing.toml", table="serve", flags={})


def test_an_empty_path_is_refused_wherever_it_comes_from(load, monkeypatch):
    with pytest.raises(UsageError, match=r"setting also: it is empty"):
        load(also=("",))
    with pytest.raises(UsageError, match=r"setting token_file: it is empty"):
        load('[serve]\ntoken_file = ""')
    monkeypatch.setenv("TIERD_STATE_DIR", "")
    with pytest.raises(UsageError, match=r"setting state_dir: it is empty"):
        load()
