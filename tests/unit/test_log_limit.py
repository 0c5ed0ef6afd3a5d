"""Logs: what repeats is counted and left out, what is rare is never held back."""

from __future__ import annotations

import json

import pytest
import structlog

from tierd.observe.log_limit import LogLimiter, LogLines
from tierd.observe.logs import configure_logs


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def passes(limiter, name, level="info"):
    event = {"event": name, "level": level}
    try:
        return limiter(None, level, event)
    except structlog.DropEvent:
        return None


def test_a_flood_of_one_event_is_cut_and_others_are_not(clock):
    lines = LogLines()
    limiter = LogLimiter(lines, clock, most=3, seconds=10)
    assert [passes(limiter, "again") is not None for _ in range(8)] == [True] * 3 + [False] * 5
    assert passes(limiter, "rare", "warning") == {"event": "rare", "level": "warning"}
    assert lines.left_out == 5
    assert lines.written == {"debug": 0, "info": 3, "warning": 1, "error": 0, "critical": 0}
    clock.now = 10.0
    assert passes(limiter, "again")["left_out"] == 5
    assert "left_out" not in passes(limiter, "again")


def test_what_is_remembered_is_bounded(clock):
    limiter = LogLimiter(LogLines(), clock, most=1, seconds=10)
    for number in range(1000):
        assert passes(limiter, f"event {number}")
    assert len(limiter._windows) == 256
    assert passes(limiter, "event 0")  # forgotten
    assert not passes(limiter, "event 999")


def test_lines_that_were_left_out_are_not_written(capsys):
    before = structlog.get_config()
    try:
        configure_logs("info")
        log = structlog.get_logger()
        for number in range(150):
            log.info("the same", number=number)
        log.debug("below the level")
    finally:
        structlog.configure(**before)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["number"] for line in lines] == list(range(100))
