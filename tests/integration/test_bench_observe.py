"""The measurement of what looking on costs runs, and says what it should; its figures are for quiet machines."""

from __future__ import annotations

import json
import shutil

import pytest
from daemons import command


def test_a_quick_run_without_a_browser_has_the_figures():
    run = command("tierd", "bench", "observe", "--quick", "--no-browser", "--json")
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["brain_fps"] is None
    assert 100 < answer["series"] <= 800
    assert answer["scrape_seconds"] == sorted(answer["scrapes"])[2] > 0
    assert len(answer["viewer_core_shares"]) == 2
    assert type(answer["viewer_core_share"]) is float
    assert 0 < answer["recorder_core_share"] < 1
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the Debian package chromium")
def test_a_browser_draws_the_largest_models():
    speed = pytest.importorskip("tierd.observebench.brain_speed")
    pytest.importorskip("playwright")
    found = speed.brain_speed(0.5)
    assert set(found) == {"76x256", "92x896"}
    assert all(rate > 0 for rate in found.values())
