"""The first Ctrl-C or SIGTERM asks a command to stop, the next one does what it always does."""

from __future__ import annotations

import os
import signal

import pytest

from tierd.stopping import stopped_by_signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_only_the_first_signal_asks(first, second):
    heard = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: heard.append(got)) for number in numbers}
    try:
        with stopped_by_signals(lambda: heard.append("stop")):
            os.kill(os.getpid(), first)
            assert heard == ["stop"]
            os.kill(os.getpid(), second)
            assert heard == ["stop", second]
        with stopped_by_signals(lambda: heard.append("unasked")):
            pass
        os.kill(os.getpid(), first)
        assert heard == ["stop", second, first]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
