from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute_node.engine.stop import StopStrings, stop_token_ids
from tierd.errors import UnsupportedModel, UsageError


def run(strings, pieces):
    stop, shown = StopStrings(strings), ""
    for piece in pieces:
        shown += stop.push(piece)
        if stop.stopped:
            return shown, True
    return shown + stop.flush(), False


@pytest.mark.parametrize("pieces", [["ABC"], ["A", "BC"], ["AB", "C"], ["xABCy"], ["x", "A", "B", "C"]])
def test_a_stop_string_ends_the_text_however_it_is_cut(pieces):
    shown, stopped = run(["ABC"], pieces)
    assert stopped
    assert shown == "".join(pieces).split("ABC", maxsplit=1)[0]


def test_text_that_only_begins_like_a_stop_string_is_shown():
    assert run(["ABC"], ["AB", "X"]) == ("ABX", False)
    assert run(["ABC"], ["AB"]) == ("AB", False)
    assert run(["AAB"], ["AA", "A", "A", "B", "rest"]) == ("AA", True)


def test_the_earliest_of_several_stop_strings_counts():
    assert run(["yes", "no"], ["maybe no, yes"]) == ("maybe ", True)


def test_nothing_is_shown_after_the_stop():
    stop = StopStrings(["."])
    assert stop.push("one. two") == "one"
    assert stop.push(" three") == ""
    assert stop.flush() == ""


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4), st.text("abc", max_size=20), st.data())
def test_any_cut_shows_what_the_whole_text_would(strings, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    places = [text.find(string) for string in strings if string in text]
    shown, stopped = run(strings, pieces)
    assert stopped == bool(places)
    if not places:
        assert shown == text
    else:
        # Cut finer, a short stop string inside a longer one is complete first.
        assert text.startswith(shown)
        assert all(string not in shown for string in strings)


def test_unreasonable_stop_strings_are_refused():
    StopStrings(["x" * 1024] * 16)
    for strings in ([""], ["x" * 1025], ["x"] * 17):
        with pytest.raises(UsageError, match="stop string"):
            StopStrings(strings)


def store(**files):
    return SimpleNamespace(
        manifest=SimpleNamespace(files=[SimpleNamespace(name=f"{name}.json") for name in files]),
        read_file=lambda name: json.dumps(files[name.removesuffix(".json")]).encode(),
    )


def test_generation_config_names_the_stop_tokens_before_config():
    assert stop_token_ids(store(generation_config={"eos_token_id": [1, 2]}), [9]) == {1, 2}
    assert stop_token_ids(store(generation_config={"eos_token_id": 3}), [9]) == {3}
    assert stop_token_ids(store(generation_config={}), [9]) == {9}
    assert stop_token_ids(store(), []) == frozenset()
    with pytest.raises(UnsupportedModel, match=r"generation_config.json.*eos_token_id"):
        stop_token_ids(store(generation_config={"eos_token_id": "end"}), [9])
