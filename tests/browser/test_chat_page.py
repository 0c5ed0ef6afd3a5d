"""The chat page in a real browser against a real node."""

from __future__ import annotations

import os
import time

import pytest
from api_server import served
from browsers import browser, needs_chromium, until, visit
from daemons import eventually

__all__ = ["browser", "visit"]

pytestmark = needs_chromium
KEY = "open-sesame"


@pytest.fixture(scope="module")
def server(embedded_store):
    with served(embedded_store, node={"max_tokens": 12}) as model:
        yield model


@pytest.mark.parametrize(("scheme", "width", "height"), [("light", 1100, 800), ("dark", 390, 780)])
def test_a_conversation_fits_and_says_what_it_took(server, visit, scheme, width, height, tmp_path):
    page = visit(server.url, color_scheme=scheme, viewport={"width": width, "height": height})
    page.wait_for_selector("#name:has-text('tiny')")
    assert "192 tokens of context" in page.text_content("#about")
    page.fill("#message", "It was a fine morning, and")
    page.keyboard.press("Enter")
    page.wait_for_selector(".stats:has-text('12 tokens')")
    answer = page.text_content(".turn.assistant .text")
    assert len(answer) > 5
    assert "tok/s" in page.text_content(".stats")
    page.fill("#message", "Go on\nplease")
    page.click("#send")
    until(page, "document.querySelectorAll('.stats').length === 2")
    assert page.locator(".turn.user .text").nth(1).inner_text() == "Go on\nplease"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert all(url.startswith(server.url + "/") for url in page.requests)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 380) == (scheme == "light")
    keep = os.environ.get("TIERD_TESTS_SCREENSHOTS")
    page.screenshot(path=f"{keep or tmp_path}/chat-{scheme}-{width}.png")


def test_stop_ends_the_answer_and_keeps_what_was_said(server, visit, monkeypatch):
    # As slow as a large model: the answer must not be over before a busy browser has clicked.
    forward = server.engine.model.forward

    def slowly(*tokens, **how):
        time.sleep(0.1)
        return forward(*tokens, **how)

    monkeypatch.setattr(server.engine.model, "forward", slowly)
    page = visit(server.url)
    page.wait_for_selector("#name:has-text('tiny')")
    page.click("#toggle")
    page.fill("#limit", "150")
    before = server.engine.stats().finished["cancelled"]
    page.fill("#message", "It was")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .text')?.textContent.length > 4")
    page.click("#stop")
    page.wait_for_selector(".stats:has-text('stopped after')")
    eventually(lambda: server.engine.stats().finished["cancelled"] == before + 1)
    assert page.is_visible("#send")
    assert len(page.text_content(".turn.assistant .text")) > 4
    page.fill("#message", "And then?")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.turn.assistant .text')[1]?.textContent.length > 4")
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.stats').length === 2")
    page.click("#fresh")
    assert page.locator(".turn").count() == 0
    server.idle()


def test_settings_reach_the_server(server, visit):
    page = visit(server.url)
    page.wait_for_selector("#name:has-text('tiny')")
    page.click("#toggle")
    page.fill("#limit", "3")
    page.fill("#temperature", "1.5")
    page.fill("#seed", "7")
    page.fill("#system", "Once upon a time")
    texts = []
    for _ in range(2):
        page.fill("#message", "it was")
        page.focus("#message")
        page.keyboard.press("Enter")
        page.wait_for_selector(".stats:has-text('3 tokens')")
        texts.append(page.text_content(".turn.assistant .text"))
        page.click("#fresh")
    assert texts[0] == texts[1]


def test_what_does_not_work_is_told(server, visit):
    page = visit(server.url, expect_errors=True)
    page.wait_for_selector("#name:has-text('tiny')")
    page.fill("#message", "word " * 400)
    page.click("#send")
    page.wait_for_selector(".failed:has-text('context')")
    assert page.input_value("#message").startswith("word word")


def test_a_key_is_asked_for_and_used(embedded_store, visit):
    with served(embedded_store, api_key=KEY, node={"max_tokens": 3}) as closed:
        page = visit(closed.url, expect_errors=True)
        page.wait_for_selector("#about:has-text('API key')")
        assert page.is_visible("#key")
        page.fill("#key", KEY)
        page.keyboard.press("Tab")
        page.wait_for_selector("#name:has-text('tiny')")
        page.fill("#message", "It was")
        page.focus("#message")
        page.keyboard.press("Enter")
        page.wait_for_selector(".stats:has-text('3 tokens')")
