"""Logical hosts of a cluster of Ray in a process of its own: told in lines on standard input, answered in JSON.

    python fleet_hosts.py '{"entrance": 1}'

`add NAME {"resource": 1}` and `kill NAME` hosts; `up FILE` (answered at once), `status FILE`, `wait FILE` until it
is up, and `down FILE` a fleet. It ends, with all hosts, when standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tierd.fleet.own import LOOPBACK_VARIABLE

os.environ[LOOPBACK_VARIABLE] = "0"

import ray
from ray._private import node, services
from ray.cluster_utils import Cluster

from tierd.fleet.cluster import joined
from tierd.fleet.fleet import bring_up, fleet_status, take_down, wait_until_up
from tierd.fleet.fleet_file import read_fleet

start_process = services.start_ray_process


def start_without_dashboard(words, kind, **options):
    """A process of Ray; in place of the dashboard's agent, which imports for seconds on each host, one that sleeps."""
    if kind == "raylet":
        facts = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        for port in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
            name = getattr(ray._raylet, f"{port}_PORT_NAME")
            ray._raylet.persist_port(facts["session_dir"], facts["node_id"], name, -1)
        asleep = "--dashboard_agent_command=setpriv --pdeathsig KILL sleep infinity"
        words = [asleep if word.startswith("--dashboard_agent_command=") else word for word in words]
    return start_process(words, kind, **options)


services.start_ray_process = start_without_dashboard
node.Node.start_api_server = lambda *_, **__: None

ATTEMPTS = 3
HEAL_SECONDS = 300.0
OBJECT_BYTES = 80 << 20
# A host that is gone is noticed after 3 s, not after 30.
LOOKS = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000,
         "health_check_failure_threshold": 3}  # fmt: skip


class Hosts:
    """The cluster, and its hosts by name."""

    def __init__(self, resources):
        self.cluster = Cluster()
        self._hosts = {}
        # Fleets are brought up beside what the main thread does: only there can hosts be started.
        self._raising = ThreadPoolExecutor(1)
        self._raised = None
        self._host(resources, _system_config=LOOKS)

    def do(self, words):
        """One line; returns what to answer."""
        match words:
            case ["add", name, resources]:
                self._hosts[name] = self._host(json.loads(resources))
                return {"added": name}
            case ["kill", name]:
                self.cluster.remove_node(self._hosts.pop(name), allow_graceful=False)
                return {"killed": name}
            case [what, file]:
                return self._fleet(what, read_fleet(Path(file)))
        raise ValueError(words)

    def _fleet(self, what, fleet):
        match what:
            case "up":
                self._raised = self._raising.submit(bring_up, fleet, lambda _: None)
                return {"raising": fleet.name}
            case "status":
                return fleet_status(fleet)
            case "wait":
                self._raised.result()
                return wait_until_up(fleet, HEAL_SECONDS)
            case "down":
                take_down(fleet, lambda _: None)
                return {"down": fleet.name}
        raise ValueError(what)

    def _host(self, resources, **options):
        options |= {"resources": resources, "num_cpus": 1, "object_store_memory": OBJECT_BYTES,
                    "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # fmt: skip
        for _ in range(ATTEMPTS - 1):
            # A host's agents have 15 s to start, which a busy machine may need for their first import.
            with contextlib.suppress(Exception):
                return self.cluster.add_node(**options)
        return self.cluster.add_node(**options)


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it notices
    hosts = Hosts(json.loads(sys.argv[1]))
    try:
        with joined(hosts.cluster.address, namespace="tests"):
            print(json.dumps({"ray": hosts.cluster.address}), file=answers, flush=True)
            for line in sys.stdin:
                print(json.dumps(hosts.do(line.split(maxsplit=2))), file=answers, flush=True)
    finally:
        hosts.cluster.shutdown()


if __name__ == "__main__":
    main()
