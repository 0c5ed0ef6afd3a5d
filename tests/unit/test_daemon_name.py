"""Naming a running daemon: by its store's directory or its address, and what is said where there is none."""

from __future__ import annotations

import pytest

from tierd.addresses import default_socket
from tierd.commands.daemon_name import daemon_address
from tierd.errors import DaemonUnavailable, UsageError


@pytest.fixture(autouse=True)
def sockets(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_directory_stands_for_its_default_socket(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    with pytest.raises(DaemonUnavailable, match=r"no daemon serves .*store: there is no socket") as caught:
        daemon_address(str(store), option="STORE")
    assert f"tierd serve {store}" in caught.value.hint
    socket = default_socket(store)
    socket.path.parent.mkdir(parents=True)
    socket.path.touch()
    assert daemon_address(str(store), option="STORE") == socket


def test_an_address_is_taken_as_it_is(tmp_path):
    assert daemon_address("127.0.0.1:9470", option="STORE").port == 9470
    with pytest.raises(DaemonUnavailable, match="no daemon listens at unix:"):
        daemon_address(f"unix:{tmp_path}/none.sock", option="STORE")


def test_what_is_neither_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"STORE: .*nosuch is no directory"):
        daemon_address(str(tmp_path / "nosuch"), option="STORE")
