from __future__ import annotations

import json
import subprocess
from itertools import pairwise

import pytest
from daemons import command

from compute_node.bench.far_link import NODE_LINK, STORE_HOST, FarLink
from compute_node.bench.far_speed import link_budget
from compute_node.bench.geometries import geometry_named
from compute_node.bench.random_model import RandomModel
from tierd.errors import UsageError

OLMOE = RandomModel(geometry_named("olmoe-1b-7b").cut(4)).geometry


@pytest.fixture
def link():
    try:
        made = FarLink(10**9)
    except UsageError as error:
        pytest.skip(str(error))
    with made:
        yield made


def test_two_namespaces_see_each_other_over_a_shaped_link_and_nothing_else(link):
    serve = (
        "import socket,sys;s=socket.create_server((sys.argv[1],9999));print(1,flush=True);print(s.accept()[0].recv(9))"
    )
    server = subprocess.Popen(
        [*link.beside_store("x")[:-2], "-c", serve, STORE_HOST], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout.readline() == "1\n"
    client = "import socket,sys;s=socket.create_connection((sys.argv[1],9999),5);s.sendall(b'hello')"
    done = subprocess.run([*link.beside_node("x")[:-2], "-c", client, STORE_HOST], check=False, timeout=30)
    assert done.returncode == 0
    assert server.communicate(timeout=30)[0] == "b'hello'\n"
    node = link.beside_node("x")[:4]
    devices = subprocess.run([*node, "ls", "/sys/class/net"], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(devices) == ["lo", NODE_LINK]
    shaped = subprocess.run([*node, "tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout
    assert "tbf" in shaped
    assert "rate 1Gbit" in shaped
    link.close()
    assert node[3] not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_the_link_budget_follows_from_what_was_measured():
    figures = {
        "worker_bytes_per_token": 2.0 * 4 * (4 * 2048 + 4 * 8 + 4 * 8 * 2048),
        "worker_tokens_per_second": 50.0,
        "local_tokens_per_second": 100.0,
        "bytes_missed": 0.5,
    }
    budget = link_budget(figures, OLMOE)
    assert budget["message_seconds"] == pytest.approx(0.01 / 4)
    # 75 layers of 8 experts, hidden size 6144; the overhead of the measured run was 2.
    assert budget["worker_bytes_per_token"] == pytest.approx(2.0 * 75 * (4 * 6144 + 4 * 8 + 4 * 8 * 6144), rel=0.05)
    assert budget["bytes_bytes_per_token"] > 100 * budget["worker_bytes_per_token"]
    speeds = budget["tokens_per_second"]
    assert [row["gigabits_per_second"] for row in speeds] == [1, 10, 25, 100]
    assert all(a["worker"] < b["worker"] and a["bytes"] < b["bytes"] for a, b in pairwise(speeds))


@pytest.mark.soak
def test_over_a_slow_link_workers_beat_bytes_and_all_say_the_same(link):
    link.close()
    done = command("compute_node", "bench", "far", "--layers", 2, "--rounds", 2, "--tokens", 8, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["identical"]
    for figures in (found, found["embedded"]):
        assert figures["worker_tokens_per_second"] > figures["bytes_tokens_per_second"]
        assert figures["worker_bytes_per_token"] < figures["bytes_bytes_per_token"]
        assert figures["local_tokens_per_second"] > 0
