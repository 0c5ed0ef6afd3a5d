"""Logical hosts of a cluster of Ray in a process of its own: told in lines on standard input, answered in JSON.

    python fleet_hosts.py '{"entrance": 1}' FILE

`add NAME {"resource": 1}` and `kill NAME` hosts; `up FILE`, `status FILE`, `wait FILE` until it is up, and `down FILE`
a fleet. It ends, with all hosts, when standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from tierd.fleet.own import LOOPBACK_VARIABLE

os.environ[LOOPBACK_VARIABLE] = "0"

import ray._private.utils
from ray.cluster_utils import Cluster

from tierd.fleet.cluster import joined
from tierd.fleet.fleet import bring_up, fleet_status, take_down, wait_until_up
from tierd.fleet.fleet_file import read_fleet

# Agents without a dashboard's modules: three hosts start on one machine.
ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("not wanted here")

ATTEMPTS = 3
HEAL_SECONDS = 150.0
OBJECT_BYTES = 80 << 20
# A host that is gone is noticed after 3 s, not after 30.
LOOKS = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000,
         "health_check_failure_threshold": 3}  # fmt: skip


class Hosts:
    """The cluster, and its hosts by name."""

    def __init__(self, resources):
        self.cluster = Cluster()
        self._node(resources=resources, include_dashboard=False, no_monitor=True, _system_config=LOOKS)
        self._hosts = {}

    def do(self, words):
        """One line; returns what to answer."""
        match words:
            case ["add", name, resources]:
                self._hosts[name] = self._node(resources=json.loads(resources))
                return {"added": name}
            case ["kill", name]:
                self.cluster.remove_node(self._hosts.pop(name), allow_graceful=False)
                return {"killed": name}
            case ["up", file]:
                fleet = read_fleet(Path(file))
                bring_up(fleet, lambda _: None)
                return wait_until_up(fleet, HEAL_SECONDS)
            case ["status", file]:
                return fleet_status(read_fleet(Path(file)))
            case ["wait", file]:
                return wait_until_up(read_fleet(Path(file)), HEAL_SECONDS)
            case ["down", file]:
                take_down(read_fleet(Path(file)), lambda _: None)
                return {"down": file}
        raise ValueError(words)

    def _node(self, **options):
        options |= {"num_cpus": 1, "object_store_memory": OBJECT_BYTES, "include_log_monitor": False}
        for _ in range(ATTEMPTS - 1):
            # A host's agents have 15 s to start, which a busy machine may need for their first import.
            with contextlib.suppress(Exception):
                return self.cluster.add_node(**options)
        return self.cluster.add_node(**options)


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it notices
    hosts = Hosts(json.loads(sys.argv[1]))
    try:
        with joined(read_fleet(Path(sys.argv[2])), hosts.cluster.address):
            print(json.dumps({"ray": hosts.cluster.address}), file=answers, flush=True)
            for line in sys.stdin:
                print(json.dumps(hosts.do(line.split(maxsplit=2))), file=answers, flush=True)
    finally:
        hosts.cluster.shutdown()


if __name__ == "__main__":
    main()
