"""A daemon of one's own begins while its node still imports: it is the one that is used, and never stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from daemons import eventually

from tierd.addresses import default_socket
from tierd.client.open import open_source
from tierd.client.own_daemon import early_daemon
from tierd.errors import UsageError


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def opened(store, arena, daemon):
    return open_source(str(store), name="test", numerics="exact", kernel_path="x", arena=arena, daemon=daemon)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_node_and_daemon_import_leaves_neither_behind(embedded_store, folder, number, code):
    node = subprocess.Popen(
        [sys.executable, "-m", "compute_node", "generate", str(embedded_store), "-p", "It", "--arena", "100%"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    with node:
        daemon = int(eventually(lambda: children.read_text().split())[0])
        node.send_signal(number)
        out, err = node.communicate(timeout=60)
    assert (node.returncode, out, err) == (code, "", "")
    eventually(lambda: ended(daemon))
    assert not list(folder.iterdir())


def test_what_fails_before_a_daemon_is_waited_for_ends_it(pattern_store):
    with (
        pytest.raises(LookupError),
        early_daemon(str(pattern_store.path), in_process=False, arena="100%") as daemon,
    ):
        raise LookupError
    assert daemon.gone() is not None


def test_the_daemon_that_was_begun_is_the_one_that_is_used(pattern_store):
    with early_daemon(str(pattern_store.path), in_process=False, arena="100%") as daemon:
        with closing(opened(pattern_store.path, "100%", daemon)) as source:
            assert source.address == daemon.address
        assert daemon.gone() is not None


def test_a_daemon_that_could_not_start_says_why_when_it_is_wanted(pattern_store):
    with (
        early_daemon(str(pattern_store.path), in_process=False, arena="1") as daemon,
        pytest.raises(UsageError, match=str(pattern_store.geometry.slot_bytes)),
    ):
        opened(pattern_store.path, "1", daemon)


def test_nothing_is_begun_where_no_daemon_or_another_one_may_be_wanted(pattern_store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    store = str(pattern_store.path)
    listening = default_socket(pattern_store.path).path
    listening.parent.mkdir(parents=True, exist_ok=True)
    listening.touch()
    for named, in_process in ((store, True), (store, False), ("unix:/run/x.sock", False), ("", False)):
        with early_daemon(named, in_process=in_process, arena=None) as daemon:
            assert daemon is None
