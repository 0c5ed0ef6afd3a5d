from __future__ import annotations

import time

from tierd.processors import processor_time


def test_what_a_process_computes_keeps_the_processors_busy():
    before, end = processor_time(), time.process_time() + 0.06
    while time.process_time() < end:
        pass
    after = processor_time()
    whole, busy = (round(later - earlier, 3) for later, earlier in zip(after, before, strict=True))
    assert whole >= busy > 0.02
    assert after.whole > after.busy > 0
