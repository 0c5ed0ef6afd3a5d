"""The web page in a real browser against a real daemon: what it shows is what is, also when the daemon dies."""

from __future__ import annotations

import os
import socket

import httpx
import pytest
from browsers import browser, needs_chromium, until, visit
from daemons import eventually
from sessions import RawSession

__all__ = ["browser", "visit"]

pytestmark = needs_chromium
RAM, ONE_DRIVE, BEING_READ = 3, 1, 4
LIVE, GONE = "#link[data-state=live]", "#link[data-state=gone]"
READ_PIXEL = """([layer, expert]) => {
    const { brain } = tierd, { lens } = brain;
    const [x, y] = lens.corner(brain.cells.layers.findIndex((one) => one.number === layer), expert);
    const [w, h] = lens.cell;
    const at = [(x + w / 2) * brain.scale, (y + h / 2) * brain.scale];
    return [...brain.canvas.getContext("2d").getImageData(...at, 1, 1).data];
}"""


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    return serve_module(pattern_store.path, "--arena", 48 * pattern_store.geometry.slot_bytes, http="127.0.0.1:0")


def places(page):
    return page.evaluate("Array.from(tierd.brain.cells.places)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1240, 900), (390, 844)], ids=["desktop", "phone"])
def test_the_page_loads_and_fits(daemon, visit, scheme, width, height, tmp_path):
    page = visit(daemon.http, color_scheme=scheme, viewport={"width": width, "height": height})
    page.wait_for_selector(LIVE)
    until(page, "tierd.brain.frames > 2 && document.querySelectorAll('#tiers .bar').length === 2")
    assert page.title() == "tierd · store"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert all(url.startswith(daemon.http + "/") for url in page.requests)
    assert len(page.requests) >= 7
    until(page, "document.querySelector('#c-drive').textContent > '0'")
    shown = [int(page.text_content(f"#c-{place}")) for place in ("nowhere", "drive", "drives", "ram", "reading")]
    assert sum(shown) == 64
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 380) == (scheme == "light")
    keep = os.environ.get("TIERD_TESTS_SCREENSHOTS")
    page.screenshot(path=f"{keep or tmp_path}/{scheme}-{width}.png", full_page=True)


def test_cells_are_where_the_daemon_has_them_and_flash_when_used(daemon, visit):
    page = visit(daemon.http, color_scheme="dark")
    page.wait_for_selector(LIVE)
    raw = RawSession(daemon.address)
    raw.hello(name="watched")
    raw.acquire(1, [3, 9])
    raw.answers(2)
    raw.acquire(2, [0])
    raw.answers(1)
    until(page, f"tierd.brain.cells.places[2 * 16] === {RAM}")
    shown = places(page)
    assert [flat for flat, place in enumerate(shown) if place == RAM] == [16 + 3, 16 + 9, 32]
    assert set(shown) == {RAM, ONE_DRIVE}
    # Blue where RAM is, yellow where a drive is, once the flash has passed.
    until(page, "tierd.brain.cells.flashing.size === 0")
    red, _, blue, _ = page.evaluate(READ_PIXEL, [1, 3])
    assert blue > red + 20
    red, _, blue, _ = page.evaluate(READ_PIXEL, [1, 4])
    assert red > blue + 20
    # An expert in RAM that has rested is used again: nothing moves, and still it is seen.
    until(page, "Date.now() - tierd.brain.cells.usedAt[19] > 1000")
    steady = min(page.evaluate(READ_PIXEL, [1, 3])[:3])
    page.evaluate(
        f"""() => {{
            const read = {READ_PIXEL};
            globalThis.brightest = 0;
            (function look() {{
                brightest = Math.max(brightest, Math.min(...read([1, 3]).slice(0, 3)));
                requestAnimationFrame(look);
            }})();
        }}"""
    )
    raw.acquire(1, [3])
    raw.answers(1)
    until(page, f"brightest > {steady + 40}")
    assert page.evaluate("tierd.brain.cells.uses[19]") == 2
    page.wait_for_selector("#sessions td:has-text('watched')")
    raw.close()
    page.wait_for_selector("#sessions td:has-text('No compute node')")


def test_search_keys_and_pause(daemon, visit):
    page = visit(daemon.http)
    page.wait_for_selector(LIVE)
    until(page, "tierd.brain.cells.total === 64")
    page.fill("#find", "2 5")
    assert page.text_content("#said").startswith("layer 2, expert 5 · ")
    page.focus("#cells")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.text_content("#said").startswith("layer 1, expert 6 · ")
    page.fill("#find", "3")
    assert "of 16 experts in RAM" in page.text_content("#said")
    page.fill("#find", "99")
    assert page.text_content("#said") == "There is no layer 99 with experts."
    page.hover("#cells", position={"x": 300, "y": 60})
    assert page.text_content("#tip b").startswith("layer ")
    before = page.evaluate("tierd.brain.lens.zoom")
    page.click("#zoom-in")
    assert page.evaluate("tierd.brain.lens.zoom") > before
    page.click("#zoom-fit")
    assert page.evaluate("tierd.brain.lens.zoom") == 1
    page.click("#pause")
    frames = page.evaluate("tierd.brain.frames")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("tierd.brain.frames") == frames
    page.click("#pause")
    until(page, f"tierd.brain.frames > {frames}")


def test_an_expert_on_its_way_is_shown_as_being_read(serve, visit, pattern_store, tmp_path):
    plan = tmp_path / "hang.toml"
    plan.write_text('[[fault]]\nkind = "hang"\nexperts = [5]\nseconds = 4\n')
    daemon = serve(pattern_store.path, "--arena", "50%", "--fault-plan", plan, http="127.0.0.1:0")
    page = visit(daemon.http)
    page.wait_for_selector(LIVE)
    raw = RawSession(daemon.address)
    raw.hello()
    raw.acquire(0, [5])
    until(page, f"tierd.brain.cells.places[5] === {BEING_READ}")
    until(page, "document.querySelector('#c-reading').textContent === '1'")
    raw.answers(1)
    until(page, f"tierd.brain.cells.places[5] === {RAM}")


def test_a_killed_daemon_is_told_and_its_successor_found(serve, visit, pattern_store):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arena = 16 * pattern_store.geometry.slot_bytes
    daemon = serve(pattern_store.path, "--arena", arena, http=f"127.0.0.1:{port}")
    page = visit(daemon.http, expect_errors=True)
    page.wait_for_selector(LIVE)
    raw = RawSession(daemon.address)
    raw.hello()
    raw.acquire(0, [1])
    raw.answers(1)
    until(page, f"tierd.brain.cells.places[1] === {RAM}")
    raw.close()
    daemon.kill()
    page.wait_for_selector(GONE)
    assert page.is_visible("#notice")
    assert "What you see is old" in page.text_content("#notice")
    daemon.start()
    page.wait_for_selector(LIVE)
    assert not page.is_visible("#notice")
    until(page, f"tierd.brain.cells.places[1] === {ONE_DRIVE}")
    # A stopped process keeps its connections and says nothing.
    os.kill(daemon.process.pid, 19)
    page.wait_for_selector(GONE)
    os.kill(daemon.process.pid, 18)
    page.wait_for_selector(LIVE)


def test_a_page_too_many_is_told_why(daemon, visit):
    with httpx.Client() as client:
        streams = [client.build_request("GET", f"{daemon.http}/page/stream") for _ in range(8)]
        answers = [client.send(stream, stream=True) for stream in streams]
        assert all(answer.status_code == 200 for answer in answers)
        reading = [answer.iter_raw() for answer in answers]
        assert all(next(stream) for stream in reading)
        page = visit(daemon.http, expect_errors=True)
        page.wait_for_selector(GONE)
        assert "8 pages are open" in page.text_content("#notice")
        for answer in answers:
            answer.close()
    page.wait_for_selector(LIVE)
    eventually(lambda: httpx.get(f"{daemon.http}/healthz").status_code == 200)
