"""Requests join, are cancelled, fail and finish in any order: all are answered, and every page comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compute_node.engine.cache_layout import CacheLayout, Plane
from compute_node.engine.kv_cache import KVCache
from compute_node.serving.scheduler import Job, Scheduler
from tierd.errors import UsageError

CONTEXT, ROWS = 200, 6


def make(*, pages=4, sequences=3, rows=ROWS, max_running=3, max_waiting=3):
    cache = KVCache(CacheLayout({"rows": Plane(1, 1)}), pages=pages, sequences=sequences, context=CONTEXT)
    return cache, Scheduler(cache, rows=rows, max_running=max_running, max_waiting=max_waiting)


def next_token(tokens):
    return (tokens[-1] * 31 + len(tokens)) % 997


def prompt(kind, length):
    return [kind * 1000 + place for place in range(length)]


class SchedulerMachine(RuleBasedStateMachine):
    """A step's outcome is applied as the engine does; `goal` is how long each job becomes."""

    def __init__(self):
        super().__init__()
        self.cache, self.scheduler = make()
        self.number = 0
        self.goal = {}
        self.answered = []

    @rule(kind=st.integers(0, 1), length=st.integers(1, CONTEXT - 1), more=st.integers(1, 100), reuse=st.booleans())
    def join(self, kind, length, more, reuse):
        if self.scheduler.full:
            return
        self.number += 1
        job = Job(self.number, prompt(kind, length), reuse=reuse)
        self.goal[job] = min(CONTEXT, length + more)
        self.scheduler.add(job)

    def end(self, job):
        self.scheduler.remove(job)
        self.answered.append(job)

    @rule(which=st.integers(0, 5))
    def cancel(self, which):
        jobs = list(self.scheduler.jobs())
        if which < len(jobs):
            self.end(jobs[which])

    def check(self, shares):
        jobs = [share.job for share in shares]
        assert len(set(map(id, jobs))) == len(jobs)
        assert 0 < sum(share.count for share in shares) <= ROWS
        for share in shares:
            sequence = share.job.sequence
            assert share.count > 0
            assert share.start == len(sequence.tokens)
            assert sequence.tokens == share.job.tokens[: share.start]
            assert share.start + share.count <= min(sequence.limit, len(share.job.tokens))
        if any(job.alone for job in self.scheduler.running):
            assert len(jobs) == 1
            assert jobs[0].alone
            return
        # Whoever decodes is never left out, and the oldest of the others is served before younger ones.
        lacking = [job for job in self.scheduler.running if job.lacking > 1]
        assert {job for job in self.scheduler.running if job.lacking == 1} <= set(jobs)
        served = [job in jobs for job in lacking]
        assert served == sorted(served, reverse=True)

    def step(self, outcome="done"):
        oldest = min(self.scheduler.jobs(), key=lambda job: job.number, default=None)
        shares = self.scheduler.plan()
        if oldest is None:
            assert not shares
            return
        self.check(shares)
        # The oldest job always runs: it never gives its pages to anybody.
        assert oldest.sequence is not None
        if outcome == "failed":
            for share in shares:
                share.job.alone = True
        elif outcome == "done":
            complete = [share.job for share in shares if share.complete]
            self.scheduler.done(shares)
            for job in complete:
                job.tokens.append(next_token(job.tokens))
                if len(job.tokens) >= self.goal[job]:
                    self.end(job)

    @rule(outcome=st.sampled_from(["done", "done", "done", "failed", "given up"]), times=st.integers(1, 20))
    def steps(self, outcome, times):
        for _ in range(times):
            self.step(outcome)

    @invariant()
    def bounds_hold(self):
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.max_running
        assert scheduler.waiting + len(scheduler.running) <= scheduler.max_waiting + scheduler.max_running
        numbers = [job.number for job in scheduler.running]
        assert numbers == sorted(numbers)
        held = {page for job in scheduler.running for page in job.sequence.held()}
        assert self.cache.pool.available + len(held) == self.cache.pool.pages

    def teardown(self):
        # However often pages were lost: the oldest goes on in each step, so all of them end.
        bound = sum(goal for job, goal in self.goal.items()) + 10
        for _ in range(bound):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle
        assert sorted(job.number for job in self.answered) == list(range(1, self.number + 1))
        assert self.cache.pool.available == self.cache.pool.pages
        assert self.cache.open_places == self.cache.sequences


TestScheduling = SchedulerMachine.TestCase
TestScheduling.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def add(scheduler, number, length):
    job = Job(number, prompt(number, length))
    scheduler.add(job)
    return job


def finish_prompts(scheduler):
    while any(job.lacking > 0 for job in scheduler.running) or not scheduler.running:
        scheduler.done(scheduler.plan())
    for job in scheduler.running:
        job.tokens.append(1)


def test_a_step_takes_all_who_decode_then_the_oldest_prompt():
    _, scheduler = make(pages=9)
    first = add(scheduler, 1, 3)
    finish_prompts(scheduler)
    second, third = add(scheduler, 2, 8), add(scheduler, 3, 4)
    counts = []
    for _ in range(3):
        shares = scheduler.plan()
        counts.append({share.job.number: share.count for share in shares})
        scheduler.done(shares)
        first.tokens.append(1)
    assert counts == [{1: 1, 2: 5}, {1: 1, 2: 3, 3: 2}, {1: 1, 3: 2}]
    assert second.lacking == third.lacking == 0


def test_without_pages_the_youngest_gives_way_and_comes_back_at_its_old_place():
    cache, scheduler = make(pages=4)
    jobs = [add(scheduler, number, 64) for number in (1, 2, 3)]
    late = add(scheduler, 4, 100)
    finish_prompts(scheduler)
    # One page is free for three that need one; the youngest goes, and its own page is enough for the second.
    assert [share.job.number for share in scheduler.plan()] == [1, 2]
    assert scheduler.preempted == 1
    assert jobs[2].sequence is None
    assert [job.number for job in scheduler.jobs()] == [1, 2, 3, 4]
    scheduler.remove(jobs[0])
    shares = scheduler.plan()
    assert [(share.job.number, share.start, share.count) for share in shares] == [(2, 64, 1), (3, 0, 5)]
    assert late.sequence is None
    assert cache.pool.available == 0


def test_the_queue_is_bounded_and_a_cancelled_job_takes_nobodys_place():
    _, scheduler = make(max_running=1, max_waiting=2, sequences=1)
    jobs = [add(scheduler, number, 5) for number in (1, 2, 3)]
    scheduler.plan()
    assert scheduler.full
    assert (scheduler.active, scheduler.waiting) == (1, 2)
    jobs[0].cancelled = True
    assert not scheduler.full
    assert scheduler.active == 0


def test_a_prefix_that_another_has_computed_is_not_computed_again():
    _, scheduler = make(pages=9, rows=100)
    add(scheduler, 1, 150)
    finish_prompts(scheduler)
    job = Job(2, prompt(1, 140))
    scheduler.add(job)
    share = scheduler.plan()[-1]
    assert (share.job, share.start, share.count, job.taken_over) == (job, 128, 12, 128)
    apart = Job(3, prompt(1, 140), reuse=False)
    scheduler.add(apart)
    scheduler.plan()
    assert apart.taken_over == 0


@pytest.mark.parametrize("wrong", [{"max_running": 0}, {"max_running": 4}, {"rows": 2}, {"max_waiting": -1}])
def test_bounds_that_do_not_fit_are_refused(wrong):
    with pytest.raises(UsageError, match="--max-"):
        make(**wrong)
