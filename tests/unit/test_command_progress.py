"""Progress of long work: a bar on a terminal, few plain lines in a pipe, nothing for short work."""

from __future__ import annotations

import io
import os
import pty

from tierd.commands.progress import ByteProgress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_pipe_gets_a_line_every_few_seconds_with_speed_and_time_left():
    clock, out = Clock(), io.StringIO()
    with ByteProgress("safe to stop", stream=out, clock=clock) as bar:
        for second in range(21):
            clock.now = 100.0 + second
            bar.update(second * 50_000_000, 1_000_000_000, f"shard {1 + second // 10}/3")
    assert out.getvalue().splitlines() == [
        "shard 1/3  25 %  50 MB/s, about 15 s left",
        "shard 2/3  50 %  50 MB/s, about 10 s left",
        "shard 2/3  75 %  50 MB/s, about 5 s left",
        "shard 3/3  100 %  50 MB/s",
    ]


def test_speed_does_not_count_what_an_earlier_run_did():
    clock, out = Clock(), io.StringIO()
    with ByteProgress(stream=out, clock=clock) as bar:
        bar.update(900_000_000, 1_000_000_000, "a")
        clock.now += 10
        bar.update(910_000_000, 1_000_000_000, "a")
    assert out.getvalue() == "a  91 %  1 MB/s, about 90 s left\n"


def test_short_work_says_nothing_in_a_pipe():
    out = io.StringIO()
    with ByteProgress(stream=out, clock=Clock()) as bar:
        bar.update(1, 2, "a")
        bar.update(2, 2, "a")
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, ByteProgress("safe to stop", stream=terminal) as bar:
        bar.update(1, 4, "shard 1/2")
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert "shard 1/2" in shown
    assert "25 %" in shown
