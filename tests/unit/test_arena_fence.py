from __future__ import annotations

import pytest

from tierd.arena.fence import WriterFence
from tierd.errors import ArenaError


def test_this_host_has_a_fence_that_can_be_called():
    fence = WriterFence()
    assert fence.available
    assert fence.kind == "global-expedited"
    fence()


@pytest.mark.parametrize(
    ("refused", "kind"), [({1 << 1}, "global"), ({1 << 0, 1 << 1}, "none")], ids=["only the slow one", "none"]
)
def test_a_kernel_that_refuses_a_command_is_noticed(monkeypatch, refused, kind):
    real = WriterFence._membarrier
    monkeypatch.setattr(
        WriterFence, "_membarrier", lambda self, command: -1 if command.value in refused else real(self, command)
    )
    fence = WriterFence()
    assert fence.kind == kind
    assert fence.available == (kind != "none")


def test_an_unavailable_fence_is_an_error_and_never_silently_nothing(monkeypatch):
    monkeypatch.setattr(WriterFence, "_membarrier", lambda _self, _command: -1)
    fence = WriterFence()
    assert not fence.available
    with pytest.raises(ArenaError, match="membarrier") as caught:
        fence()
    assert "seccomp" in caught.value.hint


def test_a_fence_that_stops_working_is_an_error(monkeypatch):
    fence = WriterFence()
    monkeypatch.setattr(WriterFence, "_membarrier", lambda _self, _command: -1)
    with pytest.raises(ArenaError):
        fence()
