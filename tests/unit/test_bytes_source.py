from __future__ import annotations

from queue import SimpleQueue
from threading import Timer
from types import SimpleNamespace

import pytest

from tierd.access import LOCAL_ACCESS
from tierd.addresses import Address
from tierd.client import bytes_source
from tierd.client.bytes_source import BytesSource
from tierd.client.record_stream import Arrival
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable, DeadlineExceeded
from tierd.store.checksums import xxh3
from tierd.store.synthetic import expected_record, make_store

DEADLINE = 0.15


class Link:
    """What comes of each question: an error, all records a little later, or nothing."""

    def __init__(self, store, *answers):
        self.store, self.answers = store, list(answers)

    def ask(self, layer, experts, *_, **__):
        transfer, answer = SimpleNamespace(arrivals=SimpleQueue()), self.answers.pop(0)
        if isinstance(answer, Exception):
            transfer.arrivals.put(answer)
        elif answer == "records":
            Timer(0.02, self.send, [transfer, layer, experts]).start()
        return transfer

    def send(self, transfer, layer, experts):
        for expert in experts:
            record = bytearray(expected_record(self.store.manifest, layer, expert))
            transfer.arrivals.put(Arrival(expert, record, 1, "miss"))

    def give_up(self, transfer):
        pass


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A source whose daemon answers as told; `away` says how often it cannot be found."""
    monkeypatch.setattr(bytes_source, "_GRACE_SECONDS", 0.0)
    store = make_store(tmp_path / "store", layers=1, experts=4, top_k=2, fill="pattern")

    def make(*answers, away):
        tries = iter([DaemonUnavailable("nobody answers")] * away)

        def check():
            if (error := next(tries, None)) is not None:
                raise error

        remote = SimpleNamespace(
            manifest=store.manifest,
            fingerprint=store.fingerprint,
            tiers=["ram", "drive"],
            checksum=lambda flat: xxh3(expected_record(store.manifest, 0, flat)),
            check_still_there=check,
        )
        monkeypatch.setattr(bytes_source, "RecordStream", lambda *_, **__: Link(store, *answers))
        address = Address(host="127.0.0.1", port=1)
        return BytesSource(address, remote, access=LOCAL_ACCESS, deadline=DEADLINE, patience=5.0, loop=None)

    return make


def fetch(source):
    used = []
    source.visit(0, [1, 3], lambda expert, _: used.append(expert), step=1, phase=Phase.DECODE)
    return used


def test_a_daemon_that_was_away_for_longer_than_a_layer_may_take_has_all_of_its_time_again(far):
    source = far(DaemonUnavailable("it went away"), "records", away=1)
    assert fetch(source) == [1, 3]
    assert source.stats.repeated == 2


def test_records_that_do_not_come_are_an_error_after_the_deadline(far):
    with pytest.raises(DeadlineExceeded, match="did not send 2 experts"):
        fetch(far("nothing", away=0))
