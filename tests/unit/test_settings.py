"""What is wrong with a setting is said where it was given."""

from __future__ import annotations

import pytest

from tierd.errors import UsageError
from tierd.settings import ServeSettings


@pytest.mark.parametrize(
    ("name", "advice"),
    [("aren", "Did you mean arena"), ("drive-threads", "Did you mean drive_threads?"), ("bogus", "arena, arena_dir")],
)
def test_an_unknown_key_of_a_file_is_named_with_those_that_are_like_it(tmp_path, name, advice):
    config = tmp_path / "tierd.toml"
    config.write_text(f"[serve]\n{name} = 3\n")
    with pytest.raises(UsageError, match=f"no setting {name}") as caught:
        ServeSettings.load(config=config, table="serve", flags={})
    assert str(config) in caught.value.message
    assert advice in caught.value.hint


def test_a_wrong_value_is_named_with_all_the_ways_to_give_it(tmp_path):
    config = tmp_path / "tierd.toml"
    config.write_text("[serve]\ndrive_threads = 1000\n")
    with pytest.raises(UsageError, match="setting drive_threads") as caught:
        ServeSettings.load(config=config, table="serve", flags={})
    assert "--drive-threads, TIERD_DRIVE_THREADS, or drive_threads under [serve]" in caught.value.hint
