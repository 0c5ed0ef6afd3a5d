"""Which read a drive's threads begin next, and when: with a clock that stands still until it is moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierd.devices.device import RecordRead
from tierd.devices.read_queue import Job, ReadQueue

LARGE, SMALL = 4 << 20, 1 << 18
SECONDS = 0.01
"""That the drive takes for a large record."""


class World:
    """A queue, and the thread of a drive that takes from it."""

    def __init__(self):
        self.now = 100.0
        self.queue = ReadQueue(lambda: self.now)
        self.slots = 0

    def job(self, *, ahead, nbytes=LARGE):
        self.slots += 1
        read = RecordRead(self.slots, 0, self.slots, 0, 4096, nbytes, 0)
        return Job(read, self.slots, memoryview(b""), lambda *_: None, self.now, ahead=ahead)

    def add(self, *, ahead, nbytes=LARGE):
        job = self.job(ahead=ahead, nbytes=nbytes)
        self.queue.add(job)
        return job

    def withdraw(self, job):
        if job.pieces.withdraw():
            self.queue.moved(job)
            return True
        return False

    def take(self):
        """A read that a thread begins, with all of its pieces; none has more than one here."""
        taken = self.queue.take()
        return taken and taken[0]

    def moved(self, job, *, follows=False):
        assert job.pieces.moved(0, None)
        following = self.queue.moved(job, follows=follows)
        return following and following[0]

    def learn(self):
        """The drive reads one record ahead, so that its pace is known."""
        job = self.add(ahead=True)
        assert self.take() is job
        self.now += SECONDS
        self.moved(job)


@pytest.fixture
def world():
    made = World()
    made.learn()
    return made


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_reads_that_somebody_waits_for_begin_in_the_order_in_which_they_come(world):
    jobs = [world.add(ahead=False) for _ in range(3)]
    assert [world.take() for _ in jobs] == jobs


def test_a_read_ahead_begins_when_the_last_wanted_one_has_moved(world):
    wanted = [world.add(ahead=False) for _ in range(2)]
    ahead = world.add(ahead=True)
    assert [world.take(), world.take()] == wanted
    assert world.moved(wanted[0], follows=True) is None
    assert world.moved(wanted[1], follows=True) is ahead
    assert ahead.started == world.now


def test_small_reads_ahead_go_to_the_drive_together_up_to_a_mebibyte(world):
    jobs = [world.add(ahead=True, nbytes=SMALL) for _ in range(6)]
    assert [world.take() for _ in range(4)] == jobs[:4]
    assert world.moved(jobs[0], follows=True) is jobs[4]


@pytest.mark.parametrize("wanted", [False, True])
def test_the_next_read_ahead_begins_shortly_before_the_one_at_work_ends(world, wanted):
    first, second = world.add(ahead=not wanted), world.add(ahead=True)
    assert world.take() is first
    world.now += SECONDS - 1e-4
    assert world.take() is second
    assert world.moved(first) is None


def test_it_does_not_begin_while_the_one_at_work_has_long_to_go_and_a_wanted_one_comes_first(world, thread):
    first, second = world.add(ahead=True), world.add(ahead=True)
    assert world.take() is first
    world.now += SECONDS / 2
    taking = thread.submit(world.take)
    wanted = world.add(ahead=False)
    assert taking.result(60) is wanted
    assert world.moved(first, follows=True) is None
    assert world.moved(wanted, follows=True) is second


def test_a_third_one_does_not_begin_beside_two_at_work_however_late_they_are(world, thread):
    first, second, third = (world.add(ahead=True) for _ in range(3))
    assert world.take() is first
    world.now += SECONDS
    assert world.take() is second
    world.now += 100 * SECONDS
    taking = thread.submit(world.take)
    wanted = world.add(ahead=False)
    assert taking.result(60) is wanted
    for job in (first, wanted, second):
        world.moved(job)
    assert world.take() is third


def test_the_pace_is_that_of_the_drive_and_not_of_reads_that_waited_for_each_other(world):
    jobs = [world.add(ahead=True) for _ in range(9)]
    last = world.take()
    assert last is jobs[0]
    for job in jobs[1:-1]:
        world.now += SECONDS - 1e-4
        assert world.take() is job
        world.now += 1e-4
        assert world.moved(last) is None
        last = job
    # The last but one began long ago, and ends as long after the one before it as ever.
    world.now += SECONDS - 1e-4
    assert world.take() is jobs[-1]


def test_one_that_was_withdrawn_is_never_begun(world):
    first, second, third = (world.add(ahead=True) for _ in range(3))
    assert world.take() is first
    assert world.withdraw(second)
    world.now += SECONDS
    assert world.take() is third
    assert not world.withdraw(third)


def test_closing_wakes_a_thread_that_stands_by(world, thread):
    first, second = world.add(ahead=True), world.add(ahead=True)
    assert world.take() is first
    taking = thread.submit(world.take)
    world.queue.close(1)
    # What has not begun is for it to refuse.
    assert taking.result(60) is second
    assert world.take() is None


class AnyOrder(RuleBasedStateMachine):
    """Reads come, are promoted, withdrawn, begun and done in any order."""

    def __init__(self):
        super().__init__()
        self.world = World()
        self.open = []
        self.begun = []

    def began(self, job):
        assert job in self.open, "begun twice, or withdrawn before"
        self.open.remove(job)
        if job.ahead:
            assert not any(other.slot < job.slot for other in self.open if not other.ahead), "a wanted read waits"
        self.begun.append(job)

    @rule(ahead=st.booleans(), nbytes=st.sampled_from([LARGE, SMALL]))
    def add(self, ahead, nbytes):
        self.open.append(self.world.add(ahead=ahead, nbytes=nbytes))

    @rule(seconds=st.sampled_from([0.0, SECONDS / 2, SECONDS]))
    def wait(self, seconds):
        self.world.now += seconds

    @precondition(lambda self: self.open or self.begun)
    @rule(data=st.data())
    def promote(self, data):
        job = data.draw(st.sampled_from(self.open + self.begun))
        if job.ahead:
            self.world.queue.promote(job)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data):
        job = data.draw(st.sampled_from(self.open))
        assert self.world.withdraw(job)
        self.open.remove(job)

    @precondition(lambda self: any(job.queued for job in self.open))
    @rule()
    def take(self):
        self.began(self.world.take())

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), follows=st.booleans())
    def moved(self, data, follows):
        job = data.draw(st.sampled_from(self.begun))
        self.begun.remove(job)
        following = self.world.moved(job, follows=follows)
        if following is not None:
            self.began(following)

    @invariant()
    def something_goes_on(self):
        if self.open:
            assert self.begun or any(job.queued for job in self.open)

    @invariant()
    def at_most_one_large_read_ahead_beside_another(self):
        large = [job for job in self.begun if job.ahead and job.read.nbytes == LARGE]
        assert len(large) <= 2

    def teardown(self):
        for _ in range(len(self.open) + len(self.begun)):
            if self.begun:
                following = self.world.moved(self.begun.pop(), follows=True)
                if following is not None:
                    self.began(following)
            if any(job.queued for job in self.open):
                self.began(self.world.take())
        assert not self.open


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
