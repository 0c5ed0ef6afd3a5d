"""A tier changes how fast an expert arrives, never a token: real daemons at every size of arena, and real nodes."""

from __future__ import annotations

import pytest
from daemons import PROMPT, eventually

from compute_node.commands.applied_settings import generation_params
from compute_node.commands.opening import open_store
from compute_node.commands.options import load_settings
from compute_node.prediction import hinting
from tierd.store.store import ExpertStore

SETTINGS = load_settings(None, max_tokens=32, seed=0)


def answer(daemon, max_tokens, prompt=PROMPT, prefetch="off"):
    """The tokens and the node's own count of one answer, computed in this process."""
    settings = SETTINGS.model_copy(update={"max_tokens": max_tokens, "prefetch": prefetch})
    params = generation_params(settings, stop=[], ignore_eos=True)
    with open_store(daemon.name, settings, name="test") as opened:
        assert opened.tokenizer is not None
        *_, last = opened.generator.generate(opened.tokenizer.encode(prompt), params)
        return list(last.token_ids), last.experts_chosen, opened.source.stats


def at_rest(counted):
    """The counts, once nodes have gone and the last guess has been read."""
    return counted if not counted["sessions"] and not counted["drives"][0]["in_flight"] else None


def read_ahead(counted):
    """Experts that the daemon read before anybody asked: every guess that is read ends in one of these counts."""
    prefetch = counted["prefetch"]
    return sum(prefetch[name]["experts"] for name in ("used", "late", "wasted", "pending"))


@pytest.mark.parametrize("prefetch", ["off", "on"])
@pytest.mark.parametrize("arena", ["2 slots", "10%", "25%", "100%"])
def test_the_tokens_are_those_of_a_node_without_a_daemon(
    serve, embedded_store, reference, arena, prefetch, monkeypatch
):
    monkeypatch.setattr(hinting, "_PASSING_BYTES", 1)  # as with large records: layers that lack nothing are hinted from
    geometry = ExpertStore.open(embedded_store).geometry
    slots = {"2 slots": 2, "10%": 25, "25%": 64, "100%": 256}[arena]
    size = 2 * geometry.slot_bytes if arena == "2 slots" else arena
    daemon = serve(embedded_store, "--arena", size, "--prefetch", prefetch)
    tokens = 12 if arena == "2 slots" else 32
    token_ids, chosen, stats = answer(daemon, tokens, prefetch=prefetch)
    assert token_ids == reference["token_ids"][:tokens]
    counted = eventually(lambda: at_rest(daemon.stats()))
    asked, drive = counted["requests"], counted["drives"][0]
    assert asked["requests"] == chosen == stats.requested
    assert asked["requests"] == asked["hits"] + asked["misses"] + asked["joined"]
    assert (asked["hits"], asked["misses"]) == (stats.outcomes["hit"], stats.outcomes["miss"])
    assert drive["reads"] == asked["misses"] + read_ahead(counted)
    assert drive["bytes"] == drive["reads"] * geometry.slot_bytes
    assert (read_ahead(counted) > 0) is (prefetch == "on" and arena != "2 slots")
    assert counted["arena"]["slots"] == slots
    if arena == "100%":
        assert asked["misses"] <= geometry.experts_total
        assert counted["arena"]["evictions"] == counted["prefetch"]["wasted"]["experts"]
    else:
        assert counted["arena"]["evictions"] > 0


def test_two_nodes_at_once_get_the_tokens_they_get_alone(serve, node, embedded_store, reference):
    daemon = serve(embedded_store, "--arena", "100%")
    other_prompt = "And God said unto"
    nodes = [node(daemon, tokens=32), node(daemon, tokens=32, prompt=other_prompt)]
    first, second = [one.finish() for one in nodes]
    # What a node used without a message is counted when its session has ended.
    counted = eventually(lambda: (s := daemon.stats())["sessions"] == [] and s)
    alone, _, stats = answer(daemon, 32, other_prompt)
    assert first["token_ids"] == reference["token_ids"][:32]
    assert second["token_ids"] == alone
    asked = counted["requests"]
    assert asked["requests"] == first["unique_experts"] + second["unique_experts"]
    assert asked["requests"] == asked["hits"] + asked["misses"] + asked["joined"]
    # Each expert was read once, though both wanted most of them while they were cold. Only a guess that gave way to
    # another before its use is read again.
    wasted = counted["prefetch"]["wasted"]["experts"]
    assert counted["drives"][0]["reads"] == asked["misses"] + read_ahead(counted) <= 256 + wasted
    assert counted["arena"]["evictions"] == wasted
    assert stats.outcomes["miss"] == 0
