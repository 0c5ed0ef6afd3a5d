from __future__ import annotations

import time

from tierd.processors import processor_time


def test_what_a_process_computes_keeps_the_processors_busy():
    before, end = processor_time(), time.process_time() + 0.06
    while time.process_time() < end:
        pass
    after = processor_time()
    assert after.busy - before.busy > 0.02
    assert after.whole - before.whole >= after.busy - before.busy
    assert after.whole > after.busy > 0
