"""A real browser for tests of pages: opened once for a module, and strict about what a page says and whom it asks."""

from __future__ import annotations

import shutil

import pytest
from daemons import eventually

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-gpu",
]  # fmt: skip

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens pages, which note in `requests` whom they asked; in the end none of them may have complained."""
    contexts, complaints = [], []

    def visit(url, *, expect_errors=False, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        if not expect_errors:
            # Reading pixels is what the tests do, not the page.
            page.on("console", lambda m: None if "getImageData" in m.text else complaints.append(m.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("response", lambda r: complaints.append(r.url) if r.status != 200 else None)
        page.requests = []
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def until(page, condition):
    """Wait for a condition in the page; its own rules forbid the waiting that the browser's tools would do there."""
    return eventually(lambda: page.evaluate(condition))
