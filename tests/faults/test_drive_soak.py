"""Mixed requests for a while under random faults on both drives, never on both copies of one record."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
import structlog
from rigs import EXPERTS, LAYERS, Rig, copy_of, make_toy, open_descriptors, plan_file

from tierd.errors import TierdError

DEADLINE = 20.0
ROUNDS = 8


def rss_bytes():
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def random_faults(rng):
    """Each drive is sick for the half of the experts that the other one has sound."""
    every = range(LAYERS * EXPERTS)
    for drive, experts in (("nvme", every[::2]), ("mirror1", every[1::2])):
        for kind in ("eio", "short", "flip", "vanish", "delay", "hang"):
            rule = {"kind": kind, "drive": drive, "experts": list(experts), "probability": rng.uniform(0.01, 0.15)}
            if kind == "eio":
                rule["errno"] = rng.choice(["EIO", "EAGAIN", "EREMOTEIO", "EACCES"])
            if kind in ("delay", "hang"):
                rule["seconds"] = rng.uniform(0.001, 0.3)
            yield rule


async def one_of_many(rig, rng):
    """A request that is awaited, or abandoned in the middle."""
    fetch = asyncio.ensure_future(rig.fetch(rng.randrange(LAYERS), rng.randrange(EXPERTS), DEADLINE))
    if rng.random() < 0.1:
        await asyncio.sleep(rng.uniform(0, 0.01))
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
    else:
        await fetch


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_wrong_byte_no_hang_and_nothing_left_behind(tmp_path, seed, soak):
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    seed = soak.seed(seed)
    rng = random.Random(seed)
    store = make_toy(tmp_path / "store")
    mirror = copy_of(store, tmp_path / "mirror")
    plan = plan_file(tmp_path / "plan.json", *random_faults(rng), seed=seed)
    try:
        async with Rig(store, slots=6, mirror=(str(mirror),), fault_plan=plan, drive_threads=3) as rig:
            before = 0
            for number in soak.rounds(ROUNDS):
                work = [one_of_many(rig, rng) for _ in range(64)]
                async with asyncio.timeout(2 * DEADLINE):
                    errors = [e for e in await asyncio.gather(*work, return_exceptions=True) if e is not None]
                assert not [e for e in errors if not isinstance(e, TierdError)], errors
                assert not errors, "the other copy of every record is sound"
                if number == ROUNDS // 2:
                    before = rss_bytes(), open_descriptors()
            assert rss_bytes() - before[0] < 16 << 20
            assert open_descriptors() - before[1] <= 2
            assert rig.counts_agree()
            assert rig.broker.pending() == 0
            counts = rig.broker.stats.total()
            assert counts.requests == counts.answered
            assert {k for info in rig.drives.info.values() for k in info.injector.injected} >= {"eio", "flip", "short"}
    finally:
        structlog.reset_defaults()
