"""`compute-node generate --trace` records what the routers chose; a replay of it has the daemon's own hits."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from inside import commands

from compute_node import embedded
from compute_node.commands import generate as command
from tierd.checkpoint.convert import convert
from tierd.errors import UsageError
from tierd.policy.policies import DEFAULT_POLICY, make_policy
from tierd.policy.replay import ReplayArena, replay, requests_of
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import load_trace

PROMPT = "It was a fine morning, and a few weeks ago she was very good. " * 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("traced") / "store"
    convert(embedded.path(), path, experts="int4-g64", dense="bf16")
    return path


@pytest.fixture(scope="module")
def plain(store):
    return generate(store, "--in-process")


def generate(store, *options):
    """What the command says, run in this process; a daemon of its own is a process."""
    run = commands(command)(store, "-p", PROMPT, "--max-tokens", 12, "--json", "--ignore-eos", *options)
    return json.loads(run.stdout)


@pytest.mark.parametrize("policy", ["lru", DEFAULT_POLICY])
def test_a_recorded_run_has_the_same_tokens_and_replays_with_the_daemons_hits(
    store, plain, tmp_path, monkeypatch, policy
):
    monkeypatch.setenv("TIERD_POLICY", policy)
    traced = generate(store, "--arena", "50%", "--messages", "--prefetch", "off", "--trace", tmp_path / "t.npz")
    assert traced["token_ids"] == plain["token_ids"]
    trace = load_trace(tmp_path / "t.npz")
    prompt, steps = traced["prompt_tokens"], Counter(trace.steps.tolist())
    assert trace.tokens[prompt:].tolist() == traced["token_ids"][:-1]
    assert trace.prefill.tolist() == [True] * prompt + [False] * 11
    assert [*steps.values()] == [64] * (prompt // 64) + [prompt % 64] * bool(prompt % 64) + [1] * 11
    assert (trace.layers, trace.top_k, trace.experts_total) == (tuple(range(8)), 4, 256)
    assert trace.expert_bytes % 4096 == 0
    assert sum(len(request.wanted) for request in requests_of(trace)) == traced["unique_experts"]
    arena = ReplayArena(make_policy(policy), 128)
    replay(trace, [arena], table=TokenTable(trace.layer_experts) if policy == DEFAULT_POLICY else None)
    assert arena.total.hits == traced["hits"]
    assert 0 < arena.total.misses == traced["misses"]


def test_what_was_learned_of_tokens_is_kept_for_the_next_run_and_changes_no_token(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERD_NODE_HISTORY", "on")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = generate(store, "--arena", "25%", "--messages")
    (saved,) = (tmp_path / "tierd" / "nodes").iterdir()
    size = saved.stat().st_size
    second = generate(store, "--arena", "25%", "--messages")
    assert second["token_ids"] == first["token_ids"]
    assert second["hits"] > first["hits"]
    assert size > 10_000


def test_a_trace_that_cannot_be_written_is_refused(store, tmp_path):
    with pytest.raises(UsageError, match="--trace"):
        generate(store, "--in-process", "--trace", tmp_path / "no" / "t.npz")
