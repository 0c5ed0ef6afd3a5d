"""Metrics, rules and dashboards against a real Prometheus that scrapes a real daemon and a real node under load."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest
from api_server import served
from daemons import eventually
from inside import commands
from prometheus_client.parser import text_string_to_metric_families
from sessions import RawSession

from compute_node.commands import metrics as node_metrics
from tierd.api import session_pb2 as pb
from tierd.commands import metrics
from tierd.errors import UsageError
from tierd.store.synthetic import make_store

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
RULES = ("recording.yml", "alerts.yml")
SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_info")

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs the Debian package prometheus"
)


def promtool(*arguments):
    run = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60, cwd=DEPLOY
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def panels():
    """Every expression of every dashboard, with its panel's title."""
    return [
        pytest.param(target["expr"], id=f"{path.stem}:{panel['title']}:{target['refId']}")
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


class Load:
    """Sessions that ask for ever for other experts, in both phases, with hints, until told to stop."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]
        for thread in self.threads:
            thread.start()

    def _run(self, number):
        raw = RawSession(self.daemon.address)
        raw.hello(name=f"load-{number}")
        for turn in range(10**6):
            if self.stopping.is_set():
                break
            layer, first = turn % 4, (3 * turn) % 16
            experts = sorted({(first + k) % 16 for k in range(3)})
            raw.acquire(layer, experts, phase=1 + turn % 2, step=turn + 1)
            raw.answers(3)
            hinted = [(first + 5) % 16, (first + 6) % 16]
            raw.send(hint=pb.Hint(layer=(layer + 1) % 4, experts=hinted, probabilities=[0.9, 0.8], step=turn + 1))
            time.sleep(0.002)
        raw.close()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)


class Questions:
    """Clients of a node that ask for a few tokens, one after the other, until told to stop."""

    def __init__(self, url):
        self.url = url
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]
        for thread in self.threads:
            thread.start()

    def _run(self, number):
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.stopping.is_set():
                asked = {"model": "tiny", "prompt": f"Once {number} ", "max_tokens": 3, "temperature": 0}
                assert client.post("/v1/completions", json=asked).status_code == 200
                assert client.get("/v1/nowhere").status_code == 404

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)


@pytest.fixture(scope="module")
def node(embedded_store):
    """A node that serves the embedded model."""
    with served(embedded_store, node={"threads": 1}) as model:
        yield model


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store, tmp_path_factory):
    """With a mirror, and a fault plan so that errors are seen, too."""
    folder = tmp_path_factory.mktemp("drives")
    shutil.copytree(pattern_store.path, folder / "copy")
    plan = folder / "plan.toml"
    plan.write_text('seed = 1\n[[fault]]\nkind = "eio"\nprobability = 0.02\n')
    arena = 14 * pattern_store.geometry.slot_bytes
    options = ("--arena", arena, "--mirror", folder / "copy", "--fault-plan", plan)
    return serve_module(pattern_store.path, *options, http="127.0.0.1:0")


@pytest.fixture(scope="module")
def prometheus(daemon, node):
    """A Prometheus that has scraped both for some seconds of load; gives the address of its API."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    loads = [Load(daemon), Questions(node.url)]
    with tempfile.TemporaryDirectory(prefix="tierd-prometheus-") as name:
        folder = Path(name)
        text = (DEPLOY / "prometheus/prometheus.yml").read_text()
        text = text.replace("127.0.0.1:9480", daemon.http.removeprefix("http://")).replace("10s", "500ms")
        text = text.replace("127.0.0.1:8000", node.url.removeprefix("http://"))
        (folder / "prometheus.yml").write_text(text)
        for rules in RULES:
            shutil.copy(DEPLOY / "prometheus" / rules, folder)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        api = f"http://127.0.0.1:{port}/api/v1"

        def scraped():
            assert process.poll() is None, (folder / "log").read_text()
            try:
                counts = [
                    float(query(api, f"min(count_over_time({name}[1m]))")[0]["value"][1])
                    for name in ("tierd_requests_total", "compute_node_requests_ended_total")
                ]
                return min(counts) >= 6
            except (httpx.TransportError, json.JSONDecodeError, IndexError):
                return False  # it is starting

        try:
            eventually(scraped)
            yield api
        finally:
            for load in loads:
                load.stop()
            process.terminate()
            process.wait(60)


def query(api, expression):
    answer = httpx.get(f"{api}/query", params={"query": expression}, timeout=60).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def wire(daemon):
    return families(daemon.http)


def families(url):
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return {family.name.removesuffix("_info"): family for family in text_string_to_metric_families(text)}


def named_in(text, prefix="tierd"):
    """Families that a text names, without the suffixes of their series."""
    names = set()
    for name in re.findall(rf"\b{prefix}_[a-z_]+", text):
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        names.add(name.removesuffix(suffix))
    return names


def test_rules_and_configuration_are_right_and_behave():
    assert "SUCCESS" in promtool("check", "config", "prometheus/prometheus.yml")
    promtool("check", "rules", *(f"prometheus/{rules}" for rules in RULES))
    assert "SUCCESS" in promtool("test", "rules", "prometheus/rules_test.yml")


def test_every_alert_says_what_to_do():
    import yaml  # noqa: PLC0415, comes with the tools of the extra `test`

    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    assert len(groups) == 2
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert len(rule["annotations"]["summary"]) > 20
        assert len(rule["annotations"]["action"]) > 40


def test_the_expositions_pass_the_linter_of_prometheus(daemon, node):
    text = b"".join(httpx.get(f"{url}/metrics", timeout=60).content for url in (daemon.http, node.url))
    run = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=30)
    assert (run.returncode, run.stderr) == (0, b"")


def test_the_dashboards_are_those_of_the_script(tmp_path):
    subprocess.run([sys.executable, DEPLOY / "grafana/build.py", tmp_path], check=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS}


@pytest.mark.parametrize("expression", panels())
def test_every_panel_has_data(prometheus, expression):
    asked = expression.replace("$__rate_interval", "10s").replace("$instance", ".+")
    found = query(prometheus, asked)
    assert found, asked
    if "histogram_quantile" not in asked:
        assert all(row["value"][1] != "NaN" for row in found)


def test_every_rule_is_evaluated_and_recorded(prometheus):
    def rules():
        groups = httpx.get(f"{prometheus}/rules", timeout=60).json()["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else None

    found = eventually(rules)
    assert [rule["name"] for rule in found if rule["health"] != "ok"] == []
    recorded = [rule["name"] for rule in found if rule["type"] == "recording"]
    assert len(recorded) > 3
    for name in recorded:
        eventually(lambda name=name: query(prometheus, name))


def test_documents_dashboards_and_wire_name_the_same_metrics(daemon):
    there = set(wire(daemon))
    dashboards = set().union(*(named_in(path.read_text()) for path in DASHBOARDS))
    assert named_in((DEPLOY / "metrics.md").read_text()) == there
    assert dashboards == there
    for rules in RULES:
        assert named_in((DEPLOY / "prometheus" / rules).read_text()) <= there


def test_documents_dashboards_and_wire_name_the_same_metrics_of_a_node(node):
    there = set(families(node.url))
    dashboards = set().union(*(named_in(path.read_text(), "compute_node") for path in DASHBOARDS))
    assert named_in((DEPLOY / "node-metrics.md").read_text(), "compute_node") == there
    assert dashboards == there
    for rules in RULES:
        assert named_in((DEPLOY / "prometheus" / rules).read_text(), "compute_node") <= there


def test_as_many_drives_as_are_admitted_stay_within_the_bound_of_series(daemon):
    samples = [sample for family in wire(daemon).values() for sample in family.samples]
    each = sum(sample.labels.get("drive") == "mirror1" for sample in samples)
    others = sum("drive" not in sample.labels for sample in samples)
    assert 0 < each < 50
    assert others + 16 * each <= 800


def test_a_real_geometry_and_many_clients_have_the_same_series(serve, tmp_path):
    small = make_store(tmp_path / "small", layers=8, experts=32, top_k=4, fill="sparse")
    large = make_store(
        tmp_path / "large", layers=76, experts=256, top_k=8, hidden=6144, intermediate=2048, format="int4-g64",
        fill="sparse",
    )  # fmt: skip
    counts = []
    for store in (small, large):
        daemon = serve(store.path, "--arena", 12 * store.geometry.slot_bytes, http="127.0.0.1:0")
        counts.append(sum(len(family.samples) for family in wire(daemon).values()))
    clients = []
    for number in range(24):
        clients.append(RawSession(daemon.address))
        clients[-1].hello(name=f"client-{number}")
    assert wire(daemon)["tierd_sessions"].samples[0].value == 24
    counts.append(sum(len(family.samples) for family in wire(daemon).values()))
    for client in clients:
        client.close()
    assert len(set(counts)) == 1
    assert counts[0] < 400


def test_the_reference_table_is_the_one_that_the_command_prints():
    for module, document in ((metrics, "metrics.md"), (node_metrics, "node-metrics.md")):
        run = commands(module)
        shown = run("--doc")
        assert shown.exit_code == 0
        assert (DEPLOY / document).read_text().endswith("\n\n" + shown.stdout)
        with pytest.raises(UsageError, match="--doc"):
            run()


def test_after_faults_and_load_the_sums_add_up(daemon, prometheus):
    del prometheus  # the load has run
    found = wire(daemon)

    def total(family):
        return sum(sample.value for sample in found[family].samples if sample.name.endswith("_total"))

    pending = found["tierd_pending_requests"].samples[0].value
    assert total("tierd_requests") == total("tierd_answers") + pending > 100
    undecided = found["tierd_prefetch_pending"].samples[0].value
    assert total("tierd_prefetch_issued") == total("tierd_prefetch_outcomes") + undecided > 0
    assert total("tierd_drive_errors") > 0
    waits = [s.value for s in found["tierd_layer_wait_seconds"].samples if s.name.endswith("_count")]
    assert len(waits) == 2
    assert all(count > 10 for count in waits)
    regrets = [s.value for s in found["tierd_eviction_regret_seconds"].samples if s.name.endswith("_count")]
    assert regrets[0] > 10
