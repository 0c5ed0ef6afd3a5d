"""What a running daemon says of itself: metrics, health, readiness, statistics."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress

import grpc.aio
import httpx
import pytest
from daemons import command, eventually, on_loop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from sessions import RawSession

from tierd.api import admin_pb2, admin_pb2_grpc
from tierd.rpc import CHANNEL_OPTIONS


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    """A daemon that has hits, misses, evictions, cancelled and failed requests behind it."""
    daemon = serve_module(pattern_store.path, "--arena", 8 * pattern_store.geometry.slot_bytes, http="127.0.0.1:0")
    raw, other = RawSession(daemon.address), RawSession(daemon.address)
    raw.hello(name="node-a")
    other.hello(name="node-b")
    for layer, experts, phase in ((0, [1, 2], 1), (1, [3], 2), (0, [1, 2, 3], 2), (2, [4, 5, 6, 7], 2), (3, [0], 1)):
        raw.acquire(layer, experts, phase=phase)
        raw.answers(len(experts))
    for layer in range(4):
        raw.acquire(layer, [8, 9, 10, 11])
        raw.answers(4)
    other.acquire(0, [12, 13, 14, 15])
    other.answers(4)
    raw.acquire(1, [0, 1, 2, 3])
    raw.answers(4)
    third = RawSession(daemon.address)
    third.hello(name="node-c")
    third.acquire(2, [0], deadline_ms=1)
    third.answers(1)
    for one in (raw, other, third):
        one.close()
    eventually(lambda: not daemon.stats()["sessions"])
    return daemon


def families(daemon):
    answer = httpx.get(f"{daemon.http}/metrics", timeout=60)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def test_metrics_obey_the_naming_rules(daemon):
    kinds = {"counter", "gauge", "histogram", "info"}
    for name, family in families(daemon).items():
        assert re.fullmatch(r"tierd_[a-z]+(_[a-z]+)*", name)
        assert family.type in kinds
        assert family.documentation.endswith(".")
        assert not re.search(r"ratio|percent|_ms$|_us$|milli|kilo|rate$", name)
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total")
                assert sample.value >= 0
            assert set(sample.labels) <= {
                "phase", "outcome", "state", "tier", "drive", "kind", "reason", "level", "le",
                "version", "fingerprint", "policy",
            }  # fmt: skip
            assert not any("node-" in value for value in sample.labels.values())


def test_the_sums_add_up_and_agree_with_the_statistics(daemon):
    found = families(daemon)

    def total(family, **labels):
        return sum(
            sample.value
            for sample in found[family].samples
            if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
        )

    asked = daemon.stats()["requests"]
    assert total("tierd_requests") == asked["requests"] > 0
    assert asked["pending"] == 0
    for phase in ("prefill", "decode"):
        assert total("tierd_requests", phase=phase) == total("tierd_answers", phase=phase) > 0
    for outcome in ("hits", "misses", "joined", "cancelled", "failed"):
        assert total("tierd_answers", outcome=outcome) == asked[outcome]
    assert asked["hits"] > 0
    assert asked["failed"] > 0
    drive = daemon.stats()["drives"][0]
    assert total("tierd_drive_reads") == drive["reads"] == asked["misses"]
    assert total("tierd_drive_read_bytes") == drive["bytes"]
    assert total("tierd_evictions") == daemon.stats()["arena"]["evictions"] > 0
    slots = {sample.labels["state"]: sample.value for sample in found["tierd_arena_slots"].samples}
    assert sum(slots.values()) >= 8
    waits = {
        s.labels["outcome"]: s.value for s in found["tierd_expert_wait_seconds"].samples if s.name.endswith("_count")
    }
    assert (waits["hit"], waits["miss"]) == (asked["hits"], asked["misses"])


def test_the_number_of_series_depends_on_neither_experts_nor_clients(daemon, serve, big_records_store):
    def series(one):
        return {
            (sample.name, *sorted(item for item in sample.labels.items() if item[0] != "fingerprint"))
            for family in families(one).values()
            for sample in family.samples
        }

    other = serve(big_records_store.path, http="127.0.0.1:0")
    assert {name for name, *_ in series(daemon)} == {name for name, *_ in series(other)}
    assert len(series(daemon)) == len(series(other)) < 800
    before = series(daemon)
    for number in range(5):
        httpx.get(f"{daemon.http}/{number}")
        raw = RawSession(daemon.address)
        raw.hello(name=f"client-{number}")
        raw.close()
    assert series(daemon) == before


def test_health_and_readiness(daemon):
    assert httpx.get(f"{daemon.http}/healthz").json() == {"status": "ok"}
    ready = httpx.get(f"{daemon.http}/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert httpx.get(f"{daemon.http}/nothing").status_code == 404
    assert httpx.post(f"{daemon.http}/metrics").status_code == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9480", "localhost.evil.example", ""])
@pytest.mark.parametrize("path", ["metrics", "healthz", "readyz", "", "page/stream"])
def test_a_foreign_host_name_is_refused(daemon, host, path):
    assert httpx.get(f"{daemon.http}/{path}", headers={"Host": host}).status_code in {400, 403}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "localhost:80"])
def test_the_local_names_are_served(daemon, host):
    assert httpx.get(f"{daemon.http}/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["metrics", "", "page/page.js", "page/stream"])
@pytest.mark.parametrize("origin", ["http://evil.example", "https://localhost", "null"])
def test_requests_of_other_sites_pages_are_refused(daemon, path, origin):
    assert httpx.get(f"{daemon.http}/{path}", headers={"Origin": origin}).status_code == 403


def test_the_page_may_load_from_the_daemon_alone(daemon):
    own = {"Origin": daemon.http}
    for path, kind in (("", "text/html"), ("page/page.js", "text/javascript"), ("page/page.css", "text/css")):
        answer = httpx.get(f"{daemon.http}/{path}", headers=own)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert httpx.get(f"{daemon.http}/page/../http.py").status_code == 404


def test_a_request_head_without_an_end_is_refused(daemon):
    address = httpx.URL(daemon.http)
    with socket.create_connection((address.host, address.port), timeout=60) as raw, suppress(ConnectionError):
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        for _ in range(64):
            raw.sendall(b"x" * 65536)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{daemon.http}/healthz").status_code == 200


def test_health_over_grpc_turns_with_a_drain_and_the_drain_ends_the_daemon(serve, pattern_store):
    daemon = serve(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes, http="127.0.0.1:0")
    holder, waiter = RawSession(daemon.address), RawSession(daemon.address)
    holder.hello()
    waiter.hello()
    holder.acquire(0, [0, 1])
    holder.answers(2)
    waiter.acquire(0, [2])
    eventually(lambda: daemon.stats()["requests"]["pending"] == 1)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    async def health(drain):
        async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
            if drain:
                await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(deadline_ms=60_000))
            check = health_pb2_grpc.HealthStub(channel).Check
            return (await check(health_pb2.HealthCheckRequest(service=""))).status

    assert on_loop(health(drain=False)) == serving
    assert on_loop(health(drain=True)) == not_serving
    assert httpx.get(f"{daemon.http}/readyz").status_code == 503
    assert httpx.get(f"{daemon.http}/healthz").status_code == 200
    holder.close()
    assert waiter.answers(1)[0]
    assert daemon.process.wait(60) == 0
    waiter.close()


def test_statistics_for_programs(daemon):
    raw = RawSession(daemon.address)
    raw.hello(name="shown by name")
    raw.acquire(0, [1, 2])
    raw.answers(2)
    run = command("tierd", "stats", daemon.name, "--json")
    assert run.returncode == 0, run.stderr
    shown = json.loads(run.stdout)
    assert set(shown) >= {"boot_id", "uptime_seconds", "requests", "arena", "drives", "sessions"}
    counters = ("requests", "hits", "misses", "joined", "cancelled", "failed", "pending", "repeated")
    assert all(type(shown["requests"][name]) is int for name in counters)
    arena = shown["arena"]
    assert arena["bytes"] == arena["slots"] * arena["slot_bytes"]
    assert arena["slots_free"] + arena["slots_filling"] + arena["slots_ready"] >= arena["slots"]
    assert type(shown["drives"][0]["direct"]) is bool
    (node,) = shown["sessions"]
    assert (node["name"], node["grants"], node["requests"], node["attached"]) == ("shown by name", 2, 2, False)
    raw.close()


def test_statistics_for_people_and_of_nobody(daemon, folder):
    run = command("tierd", "stats", daemon.name)
    assert run.returncode == 0
    assert "asked" in run.stdout
    run = command("tierd", "stats", f"unix:{folder}/nobody.sock")
    assert run.returncode == 1
    assert "nobody.sock" in run.stderr
    assert "Traceback" not in run.stderr
