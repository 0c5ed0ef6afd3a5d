"""A daemon without work does nothing: no processor time, no growing memory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from rigs import EXPERTS, LAYERS, RECORD, copy_of, make_toy
from sessions import RawSession

SECONDS = 2.0


def used(pid):
    """Processor seconds (proc(5): fields 14 and 15), private bytes and descriptors of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    anonymous = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10
    return seconds, anonymous, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_daemon_that_has_worked_comes_to_rest(serve, tmp_path):
    store = make_toy(tmp_path / "store")
    mirror = copy_of(store, tmp_path / "mirror")
    daemon = serve(store.path, "--mirror", mirror, "--arena", f"{8 * RECORD}", http="127.0.0.1:0")
    session = RawSession(daemon.address)
    session.hello(fingerprint=store.fingerprint)
    for _ in range(4):
        for layer in range(LAYERS):
            for first in range(0, EXPERTS, 4):
                session.acquire(layer, list(range(first, first + 4)))
                ready, failed = session.answers(4)
                assert (len(ready), failed) == (4, {})
    time.sleep(0.5)
    seconds, memory, descriptors = used(daemon.process.pid)
    time.sleep(SECONDS)
    seconds_later, memory_later, descriptors_later = used(daemon.process.pid)
    # Measured: 2 ms a second. A tenth leaves room for slow machines; a loop that spins takes all of it.
    assert seconds_later - seconds < 0.1 * SECONDS
    assert memory_later - memory < 1 << 20
    assert descriptors_later <= descriptors
    session.close()
