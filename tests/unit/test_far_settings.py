"""What a far node is told, as flags, in the environment and in a file alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from compute_node.commands.applied_settings import far_options, idle_far_options
from compute_node.settings import NodeSettings, WorkerSettings
from tierd.client.open import FarOptions, open_source
from tierd.errors import UsageError

WANTED = {
    "experts": "worker",
    "worker": ("a:1=2", "b:2"),
    "worker_seconds": 0.5,
    "store_cache": "1GiB",
    "tls_ca": Path("ca.pem"),
    "tls_name": "store.example",
    "token_file": Path("token"),
}
FILE = """
[node]
experts = "worker"
worker = ["a:1=2", "b:2"]
worker_seconds = 0.5
store_cache = "1GiB"
tls_ca = "ca.pem"
tls_name = "store.example"
token_file = "token"
"""


@pytest.mark.parametrize("way", ["flags", "environment", "file"])
def test_every_way_of_telling_it_comes_to_the_same(way, monkeypatch, tmp_path):
    config, flags = None, {}
    if way == "flags":
        flags = WANTED
    elif way == "file":
        config = tmp_path / "node.toml"
        config.write_text(FILE)
    else:
        for name, value in WANTED.items():
            text = ", ".join(value) if isinstance(value, tuple) else str(value)
            monkeypatch.setenv(f"TIERD_NODE_{name.upper()}", text)
    settings = NodeSettings.load(config=config, table="node", flags=flags)
    assert {name: getattr(settings, name) for name in WANTED} == WANTED
    far = far_options(settings)
    far.check()
    assert (far.experts, far.workers, far.worker_seconds) == ("worker", ("a:1=2", "b:2"), 0.5)
    assert (far.access.ca, far.access.name) == (Path("ca.pem"), "store.example")
    assert far.access.token_file == Path("token")


def test_lists_of_workers_in_the_environment_are_parted_by_spaces(monkeypatch):
    monkeypatch.setenv("TIERD_NODE_WORKER", "a:1,b:2=3 ipv4:10.0.0.1:1,10.0.0.2:1=2, dns:///c:1")
    found = NodeSettings.load(config=None, table="node", flags={}).worker
    assert found == ("a:1", "b:2=3", "ipv4:10.0.0.1:1,10.0.0.2:1=2", "dns:///c:1")


@pytest.mark.parametrize("known", [{"tls_ca": "ca.pem"}, {"tls_name": "store.example"}])
def test_plain_text_and_certificates_contradict_each_other(known, monkeypatch):
    monkeypatch.setenv("TIERD_NODE_PLAINTEXT", "yes")
    far_options(NodeSettings.load(config=None, table="node", flags={})).check()
    with pytest.raises(UsageError, match="without certificates"):
        far_options(NodeSettings.load(config=None, table="node", flags=known)).check()


def test_what_is_of_no_use_beside_a_store_of_this_host_is_said(tmp_path):
    def load(**flags):
        return NodeSettings.load(config=None, table="node", flags=flags)

    settings = load(tls_ca="/ca.pem", token_file="/token")
    for store in (str(tmp_path), "unix:/run/tierd.sock"):
        assert idle_far_options(store, settings).endswith("no use for --tls-ca, --token-file")
        assert not idle_far_options(store, load())
    assert not idle_far_options("HOST:9470", settings)
    assert not idle_far_options("unix:/run/tierd.sock", load(tls_ca="/ca.pem", worker=("HOST:9471",)))


def test_a_directory_has_no_workers(tmp_path):
    with pytest.raises(UsageError, match="--worker goes with the address of a daemon"):
        open_source(
            str(tmp_path), name="test", numerics="exact", kernel_path="x", far=FarOptions(workers=("HOST:9471",))
        )


def test_a_worker_is_told_in_the_same_ways(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERD_WORKER_LISTEN", "127.0.0.1:1")
    config = tmp_path / "worker.toml"
    config.write_text("[worker]\nlisten = '127.0.0.1:2'\nmax_nodes = 3\ntls_ca = 'ca.pem'\n")
    settings = WorkerSettings.load(config=config, table="worker", flags={"rows": 7})
    assert (settings.listen, settings.max_nodes, settings.rows) == ("127.0.0.1:1", 3, 7)
    assert settings.tls_ca == Path("ca.pem")
    with pytest.raises(UsageError, match="rows"):
        WorkerSettings.load(config=None, table="worker", flags={"rows": 0})
