"""How many frames a second a browser draws of all experts, while they move and are used."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import time
from typing import Any, Final

from tierd.errors import UsageError

__all__ = ["GEOMETRIES", "brain_speed"]

GEOMETRIES: Final = {"76x256": (76, 256), "92x896": (92, 896)}
"""Layers and experts of the largest models."""

_FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_WARM_SECONDS: Final = 1.0


def brain_speed(seconds: float) -> dict[str, float]:
    """Frames a second by geometry, in a headless Chromium without a graphics card.

    Raises:
        UsageError: there is no Chromium, or nothing to drive it with.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        playwright: Any = importlib.import_module("playwright.sync_api")
    except ImportError:
        playwright = None
    if program is None or playwright is None:
        raise UsageError(
            "no browser to draw in", hint="Install Chromium and the package playwright, or leave the part out."
        )
    found = {}
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=program, args=_FLAGS, headless=True)
        for name, (layers, experts) in GEOMETRIES.items():
            found[name] = _measure(browser, layers, experts, seconds)
        browser.close()
    return found


def _measure(browser: Any, layers: int, experts: int, seconds: float) -> float:
    command = [sys.executable, "-m", "tierd.observebench.scene", str(layers), str(experts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as scene:
        assert scene.stdout is not None
        page = browser.new_page(viewport={"width": 1240, "height": 900})
        page.goto(scene.stdout.readline().strip())
        page.wait_for_selector("#link[data-state=live]", timeout=20_000)
        page.wait_for_timeout(_WARM_SECONDS * 1000)
        before, begun = page.evaluate("tierd.brain.frames"), time.monotonic()
        page.wait_for_timeout(seconds * 1000)
        frames = page.evaluate("tierd.brain.frames") - before
        rate = float(frames / (time.monotonic() - begun))
        page.close()
        assert scene.stdin is not None
        scene.stdin.close()
        scene.wait(20)
    return rate
