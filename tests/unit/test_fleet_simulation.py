from __future__ import annotations

from dataclasses import replace

import pytest

from compute_node.bench.fleet_simulation import FleetFacts, StoreHost, simulate_fleet

FACTS = FleetFacts(
    layers=10, dense_seconds=0.002, core_seconds=0.001, wire_seconds=0.001, request_bytes=1e4, answer_bytes=1e5,
    missed_bytes=0.0,
)  # fmt: skip
HOST = StoreHost(bits_per_second=1e9, cores=4, drive_bytes_per_second=2e9)


def test_one_node_alone_waits_for_nobody():
    found = simulate_fleet(FACTS, HOST, nodes=1, hosts=1)
    layer = 0.002 + 0.001 + 0.001 + 8 * 1.1e5 / 1e9
    assert found["tokens_per_second"] == pytest.approx(1 / (10 * layer), rel=0.01)
    assert found["limit"] == "the node itself"


@pytest.mark.parametrize(
    ("facts", "host", "limit", "layers_per_second"),
    [
        (FACTS, replace(HOST, cores=1), "cores", 1000.0),
        (FACTS, HOST, "link out", 1e9 / 8e5),
        (replace(FACTS, missed_bytes=4e6), HOST, "drive", 500.0),
        (replace(FACTS, request_bytes=1e6), HOST, "link in", 125.0),
        (replace(FACTS, daemon_seconds=0.004), HOST, "daemon", 250.0),
    ],
    ids=["cores", "link out", "drive", "link in", "daemon"],
)
def test_many_nodes_get_what_the_busiest_part_allows_and_it_is_named(facts, host, limit, layers_per_second):
    found = simulate_fleet(facts, host, nodes=300, hosts=1)
    assert found["limit"] == limit
    assert found["total_tokens_per_second"] == pytest.approx(layers_per_second / 10, rel=0.15)
    assert found["busy"][limit] > 0.9


def test_more_hosts_carry_more_nodes():
    one, four = (simulate_fleet(FACTS, HOST, nodes=100, hosts=hosts) for hosts in (1, 4))
    assert four["total_tokens_per_second"] > 3 * one["total_tokens_per_second"]
    assert one["tokens_per_second"] < simulate_fleet(FACTS, HOST, nodes=2, hosts=1)["tokens_per_second"]
