from __future__ import annotations

import os

import pytest

from compute_node.engine.cores import default_threads, quota_cores


@pytest.fixture
def machine(tmp_path):
    def build(groups, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        for name, content in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return build


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/gone\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "3:cpu,cpuacct:/x\n0::/\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("2:memory:/m\n", {"memory/m/cpu.max": "100000 100000"}, None),
        ("rubbish\n0::/\n", {"cpu.max": "what\n"}, None),
        ("0::/\n", {"unified/cpu.max": "200000 100000"}, 2.0),
    ],
)
def test_the_smallest_quota_of_the_groups_above_counts(machine, groups, files, cores):
    assert quota_cores(machine(groups, files)) == cores


def test_threads_are_the_affinity_cut_by_the_quota_and_never_none(machine, tmp_path):
    affinity = len(os.sched_getaffinity(0))
    assert default_threads(tmp_path) == affinity
    root = machine("0::/\n", {"cpu.max": "10000 100000\n"})
    assert default_threads(root) == 1
    (root / "sys/fs/cgroup/cpu.max").write_text("100000000 100000\n")
    assert default_threads(root) == affinity
