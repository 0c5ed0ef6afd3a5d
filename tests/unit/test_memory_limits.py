"""Memory limits from made-up trees of small files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import ArenaError
from tierd.memory_limits import GroupLimit, HostMemory, group_limits, host_memory, read_text

MIB = 1 << 20
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"


def tree(files):
    return files.get


def v2(path="/a/b", mount=V2_MOUNT, **files):
    return tree(
        {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": mount}
        | {f"/sys/fs/cgroup{name.replace('__', '/')}": text for name, text in files.items()}
    )


def test_host_memory_is_read_in_bytes():
    text = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    600 kB\nHugePages_Total:  0\n"
    assert host_memory(tree({"/proc/meminfo": text})) == HostMemory(1000 * 1024, 600 * 1024)


def test_a_kernel_without_the_estimate_gives_what_is_free():
    text = "MemTotal: 1000 kB\nMemFree: 10 kB\n"
    assert host_memory(tree({"/proc/meminfo": text})).available == 10 * 1024


@pytest.mark.parametrize("text", [None, "", "MemTotal: lots kB", "\x00\x01"])
def test_a_host_that_says_nothing_is_an_error_with_advice(text):
    with pytest.raises(ArenaError, match="meminfo") as caught:
        host_memory(tree({"/proc/meminfo": text}))
    assert "--ram" in caught.value.hint


def test_every_group_up_to_the_top_counts():
    read = tree(
        {
            "/proc/self/cgroup": "0::/a/b\n",
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/status": "Name:\tx\nRssAnon:\t   1024 kB\n",
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
            "/sys/fs/cgroup/a/memory.max": f"{100 * MIB}\n",
            "/sys/fs/cgroup/a/memory.current": f"{30 * MIB}\n",
            "/sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {7 * MIB}\nactive_file {2 * MIB}\n",
            "/sys/fs/cgroup/memory.high": f"{900 * MIB}\n",
        }
    )
    assert group_limits(read) == [
        GroupLimit("/sys/fs/cgroup/a/memory.max", 100 * MIB, 20 * MIB),
        GroupLimit("/sys/fs/cgroup/memory.high", 900 * MIB, 0),
    ]


def test_a_container_sees_its_group_as_the_mount_itself():
    read = tree(
        {
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/memory.max": str(90 * MIB),
        }
    )
    assert [limit.limit for limit in group_limits(read)] == [90 * MIB]


def test_version_1_counts_its_own_limit_and_the_one_above_the_mount():
    read = tree(
        {
            "/proc/self/cgroup": "5:cpu,memory:/docker/f00\n4:pids:/\n0::/\n",
            "/proc/self/mountinfo": V1_MOUNT.replace(" / ", " /docker/f00 ", 1),
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(12 * MIB),
            "/sys/fs/cgroup/memory/memory.stat": (
                f"cache 1\nhierarchical_memory_limit {64 * MIB}\ntotal_inactive_file {2 * MIB}\n"
            ),
        }
    )
    assert group_limits(read) == [GroupLimit("/sys/fs/cgroup/memory/memory.limit_in_bytes", 64 * MIB, 10 * MIB)]


def test_a_path_outside_of_what_is_mounted_means_the_mount():
    mount = V2_MOUNT.replace(" / ", " /kube/pod ", 1)
    read = v2("/elsewhere/x", mount, **{"/memory.max": str(MIB)})
    assert [limit.limit for limit in group_limits(read)] == [MIB]
    read = v2("/../../other", **{"/memory.max": str(MIB)})
    assert [limit.limit for limit in group_limits(read)] == [MIB]


@pytest.mark.parametrize("text", ["max", "", "-1", "junk", "1e9", str(1 << 63), "9" * 400, "٣", None])
def test_what_is_no_limit_limits_nothing(text):
    assert group_limits(v2("/", **{"/memory.max": text})) == []


def test_blanks_in_a_mount_point_are_understood():
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups"),
        "/my groups/memory.max": "4096",
    }
    assert group_limits(tree(files)) == [GroupLimit("/my groups/memory.max", 4096, 0)]


@given(st.dictionaries(st.sampled_from(["cgroup", "mountinfo", "status"]), st.text(max_size=200)))
def test_no_text_whatever_breaks_it(files):
    group_limits(tree({f"/proc/self/{name}": text for name, text in files.items()}))


def test_files_that_cannot_be_read_are_none(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    assert read_text(str(tmp_path / "binary")) is None
    assert read_text(str(tmp_path)) is None
    assert read_text(str(tmp_path / "missing")) is None


def test_this_host_has_memory():
    memory = host_memory()
    assert 0 < memory.available <= memory.total
    assert all(limit.limit >= 0 for limit in group_limits())
