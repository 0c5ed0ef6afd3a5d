"""Pages: whatever sequences come, grow, share, go back and end, each finds its own rows, and none is lost."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compute_node.engine import cache_budget
from compute_node.engine.cache_budget import memory_of_this_host, pages_of
from compute_node.engine.cache_layout import CacheLayout, Plane
from compute_node.engine.kv_cache import KVCache
from compute_node.engine.page_pool import prefix_names
from compute_node.engine.saved_sequence import restore_sequence, save_sequence
from compute_node.kernels.op import address_of
from compute_node.kernels.pages import PAGE, slot_of
from tierd.errors import LimitExceeded, UsageError
from tierd.memory_limits import GroupLimit

ROWS = CacheLayout({"rows": Plane(1, 1)})
CONTEXT = 200


def texts():
    """Texts that begin alike: all for half a page, two of them for two pages and a bit, two for longer."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, 1000, CONTEXT).tolist()
    others = [first[:cut] + rng.integers(1000, 2000, CONTEXT - cut).tolist() for cut in (32, 130, 160)]
    return [first, *others]


TEXTS = texts()


def digests(tokens):
    """A number for each position that depends on all tokens up to it, as keys and values do."""
    found, state = [], hashlib.blake2b(digest_size=3)
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        found.append(int.from_bytes(state.copy().digest(), "little"))
    return np.array(found, np.float32)


DIGESTS = [digests(text) for text in TEXTS]


def slots(sequence, start, end):
    return [slot_of(address_of(sequence.table), position) for position in range(start, end)]


class CacheMachine(RuleBasedStateMachine):
    """Sequences of a cache whose pages do not suffice for all of them; `open` pairs each with the text it follows."""

    def __init__(self):
        super().__init__()
        self.cache = KVCache(ROWS, pages=7, sequences=3, context=CONTEXT)
        self.rows = self.cache.plane("rows")[0, :, 0]
        self.open = []

    def compute(self, sequence, text, count):
        start = len(sequence.tokens)
        self.rows[slots(sequence, start, start + count)] = DIGESTS[text][start : start + count]
        self.cache.advance(sequence, TEXTS[text][start : start + count])

    @rule(text=st.integers(0, 3), length=st.integers(1, CONTEXT), reuse=st.booleans())
    def begin(self, text, length, reuse):
        free, places = self.cache.pool.available, self.cache.open_places
        sequence = self.cache.begin(TEXTS[text][:length], reuse=reuse)
        if sequence is None:
            assert self.cache.pool.available == free
            assert places == 0 or free < -(-length // PAGE)
            return
        assert len(sequence.tokens) < length <= sequence.limit
        assert len(sequence.tokens) % PAGE == 0
        assert reuse or not sequence.tokens
        self.open.append((sequence, text))

    @rule(which=st.integers(0, 2), count=st.integers(1, 90))
    def grow(self, which, count):
        if which < len(self.open):
            sequence, text = self.open[which]
            count = min(count, sequence.room)
            if count and self.cache.reserve(sequence, count):
                self.compute(sequence, text, count)

    @rule(which=st.integers(0, 2), count=st.integers(1, 90))
    def fail(self, which, count):
        """A step that wrote what it should not have, and then was given up."""
        if which < len(self.open):
            sequence, _ = self.open[which]
            start, count = len(sequence.tokens), min(count, sequence.room)
            if count and self.cache.reserve(sequence, count):
                self.rows[slots(sequence, start, start + count)] = -1

    @rule(which=st.integers(0, 2), text=st.integers(0, 3), length=st.integers(0, CONTEXT))
    def go_back(self, which, text, length):
        if which < len(self.open):
            sequence, mine = self.open[which]
            before, wanted = list(sequence.tokens), TEXTS[text][:length]
            kept = self.cache.keep_prefix(sequence, wanted)
            assert sequence.tokens == before[:kept] == wanted[:kept]
            common = next((n for n, pair in enumerate(zip(before, wanted, strict=False)) if pair[0] != pair[1]), None)
            most = min(len(before), length) if common is None else common
            assert most - PAGE < kept <= most
            self.open[which] = (sequence, text if kept else mine)

    @rule(which=st.integers(0, 2))
    def end(self, which):
        if which < len(self.open):
            sequence, _ = self.open.pop(which)
            self.cache.give_back(sequence)

    @invariant()
    def each_finds_its_own_rows(self):
        for sequence, text in self.open:
            length = len(sequence.tokens)
            assert sequence.tokens == TEXTS[text][:length]
            assert self.rows[slots(sequence, 0, length)].tolist() == DIGESTS[text][:length].tolist()

    @invariant()
    def no_page_is_lost(self):
        held = {page for sequence, _ in self.open for page in sequence.held()}
        assert self.cache.pool.available + len(held) == self.cache.pool.pages
        assert self.cache.open_places + len(self.open) == self.cache.sequences

    def teardown(self):
        while self.open:
            self.end(0)
        self.no_page_is_lost()
        taken = self.cache.pool.take(self.cache.pool.pages)
        assert sorted(taken) == list(range(self.cache.pool.pages))


TestPages = CacheMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def computed(cache, tokens):
    sequence = cache.begin(tokens)
    cache.advance(sequence, tokens[len(sequence.tokens) :])
    return sequence


def test_a_prefix_is_taken_over_from_running_and_from_ended_sequences():
    cache, text = KVCache(ROWS, pages=8, sequences=3), list(range(200))
    first = computed(cache, text)
    second = cache.begin(text[:150])
    assert second.tokens == text[:128]
    assert second.held()[:2] == first.held()[:2]
    cache.give_back(first)
    cache.give_back(second)
    assert cache.pool.kept == 3
    third = cache.begin([*text[:100], 7])
    assert third.tokens == text[:64]
    # The last token of a text is computed even where its page is known.
    assert cache.begin(text[:128]).tokens == text[:64]


def test_what_was_left_the_longest_ago_goes_first_and_ends_go_before_beginnings():
    cache = KVCache(ROWS, pages=6, sequences=3)
    old, new = list(range(129)), list(range(1000, 1129))
    for text in (old, new):
        cache.give_back(computed(cache, text))
    assert cache.begin(list(range(5000, 5000 + 3 * PAGE))) is not None
    assert [len(cache.pool.find(prefix_names(text))) for text in (old, new)] == [1, 2]


def test_equal_texts_computed_at_once_are_both_right_and_named_once():
    cache, text = KVCache(ROWS, pages=6, sequences=3), list(range(70))
    first, second = cache.begin(text), cache.begin(text)
    for sequence in (first, second):
        cache.advance(sequence, text)
    assert first.held()[0] != second.held()[0]
    cache.give_back(second)
    assert cache.pool.kept == 0
    assert cache.begin(text).held()[0] == first.held()[0]


def test_a_recurrent_sequence_is_kept_whole_or_not_at_all():
    layout = CacheLayout({"rows": Plane(1, 2)}, {"delta": (3, 4)})
    cache, text = KVCache(layout, pages=6, sequences=2), list(range(100))
    assert cache.state("delta").shape == (4, 3, 4)
    sequence = computed(cache, text)
    assert (sequence.state_in, sequence.state_out) == (1, 0)
    assert cache.keep_prefix(sequence, [*text, 5]) == 100
    assert cache.keep_prefix(sequence, text[:80]) == 0
    other = cache.begin(text)
    assert other.tokens == []
    assert {other.state_in, other.state_out} == {2, 3}


def test_a_saved_sequence_goes_on_elsewhere():
    layout = CacheLayout({"keys": Plane(2, 3), "values": Plane(1, 5)}, {"delta": (4,)})
    first, second = (KVCache(layout, pages=4, sequences=2, context=150) for _ in range(2))
    rng = np.random.default_rng(0)
    for name in ("keys", "values"):
        first.plane(name)[:] = rng.random(first.plane(name).shape, np.float32)
    sequence = computed(first, list(range(100)))
    first.state("delta")[sequence.state_in] = [1, 2, 3, 4]
    saved = save_sequence(first, sequence)
    assert saved["keys"].shape == (2, 100, 3)
    second.take()
    again = second.take()
    restore_sequence(second, again, sequence.tokens, saved)
    assert again.tokens == sequence.tokens
    for name, kept in save_sequence(second, again).items():
        assert np.array_equal(kept, saved[name])
    for wrong in (saved | {"keys": saved["keys"][:, :99]}, saved | {"more": saved["keys"]}, {"keys": saved["keys"]}):
        with pytest.raises(UsageError, match="does not fit this model"):
            restore_sequence(second, again, sequence.tokens, wrong)
    small = KVCache(layout, pages=1, sequences=2)
    with pytest.raises(LimitExceeded):
        restore_sequence(small, small.take(), sequence.tokens, saved)
    full = KVCache(layout, pages=2, sequences=2)
    full.reserve(full.take(), 65)
    with pytest.raises(LimitExceeded, match="no room for the 100 saved tokens"):
        restore_sequence(full, full.take(), sequence.tokens, saved)
    assert full.pool.available == 0


def test_names_depend_on_everything_before():
    names = list(prefix_names(list(range(130))))
    assert len(names) == 2
    assert list(prefix_names(list(range(130)), names[:1])) == names[1:]
    assert list(prefix_names([5, *range(1, 130)]))[1] != names[1]


def test_budgets_are_whole_pages_and_hold_at_least_one():
    layout = CacheLayout({"rows": Plane(2, 32)}, {"delta": (64,)})
    assert layout.page_bytes == 64 * 2 * 32 * 4
    assert pages_of(layout, context=100, sequences=3, budget=None) == 6
    states = 3 * 2 * 64 * 4
    assert pages_of(layout, context=1 << 20, sequences=3, budget=states + 5 * layout.page_bytes) == 5
    assert pages_of(layout, context=100, sequences=3, budget=1 << 40) == 6
    with pytest.raises(UsageError, match="--kv-cache"):
        pages_of(layout, context=100, sequences=3, budget=layout.page_bytes)
    # Without a budget: a quarter of RAM, but always one whole context.
    most = memory_of_this_host() // 4 // layout.page_bytes
    assert pages_of(layout, context=PAGE, sequences=1 << 30, budget=None) < most + 1
    assert pages_of(ROWS, context=1 << 40, sequences=2, budget=None) == (1 << 40) // PAGE


def test_a_control_group_bounds_the_cache(monkeypatch):
    """As systemd's MemoryMax= does, and a container's limit."""
    whole = memory_of_this_host()
    monkeypatch.setattr(
        cache_budget, "group_limits", lambda: [GroupLimit("outer", 1 << 62, 0), GroupLimit("g", 8192, 0)]
    )
    assert memory_of_this_host() == 8192 < whole
    assert pages_of(ROWS, context=PAGE, sequences=100, budget=None) == 8192 // 4 // ROWS.page_bytes


def test_places_and_pages_are_bounded():
    cache = KVCache(ROWS, pages=2, sequences=2, context=100)
    first = cache.take()
    cache.take()
    with pytest.raises(LimitExceeded, match="all sequences"):
        cache.take()
    assert cache.reserve(first, 100)
    assert not cache.reserve(first, 129)
    with pytest.raises(LimitExceeded, match="100 tokens is full"):
        first.require(101)
    assert KVCache(ROWS, pages=1, context=100).context == PAGE
    for wrong in ({"pages": 0}, {"pages": 1, "sequences": 0}, {"pages": 1, "context": 0}):
        with pytest.raises(UsageError):
            KVCache(ROWS, **wrong)
