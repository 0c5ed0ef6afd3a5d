"""A store of a real model's geometry, in sparse files: its daemon is small, and serves what lies at the far end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sessions import RawSession

from tierd.store.synthetic import make_store

LAYERS, EXPERTS = 76, 256


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """The routed experts of GLM-5.2 in 4 bits: 390 GB that take no space."""
    return make_store(
        tmp_path_factory.mktemp("glm") / "s", layers=range(3, 3 + LAYERS), experts=EXPERTS, top_k=8, hidden=6144,
        intermediate=2048, format="int4-g64", fill="sparse",
    )  # fmt: skip


def test_a_daemon_of_19456_experts_takes_little_memory_beside_the_arena(serve, glm):
    daemon = serve(glm.path, "--arena", f"{8 * glm.geometry.slot_bytes}", "--log-level", "error")
    session = RawSession(daemon.address)
    session.hello(fingerprint=glm.fingerprint)
    for layer, expert in ((3, 0), (2 + LAYERS, EXPERTS - 1)):
        session.acquire(layer, [expert])
        ready, failed = session.answers(1, seconds=30.0)
        assert (list(ready), failed) == ([expert], {})
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    fields = {name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", text)}
    assert fields["VmRSS"] - fields["RssShmem"] < 200 * 10**6
    session.close()


def test_its_files_take_no_space(glm):
    assert glm.geometry.expert_bytes > 380 * 10**9
    assert sum(path.stat().st_blocks * 512 for path in glm.path.iterdir()) < 32 << 20
