"""The console in a real browser: what it shows, how it is used, and that it keeps to its rules."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import ADAPTERS, BASE_ID, Stack

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or ""
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
SWITCHES += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PICTURES = os.environ.get("CONSOLE_PICTURES", "")
"""Folder for pictures of the page; empty = none are kept."""
SIZES = {"wide": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not BROWSER, reason="no chromium on PATH: apt-get install -y chromium"),
]
Page = Any


@pytest.fixture
def page(stack: Stack) -> Iterator[Page]:
    """The console, open; the test fails for every complaint of the browser."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    complaints: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=SWITCHES)
        opened = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        opened.set_default_timeout(30_000)
        opened.on(
            "console", lambda message: _is_expected(message) or complaints.append(message.text)
        )
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on(
            "request",
            lambda request: request.url.startswith(stack.http) or complaints.append(request.url),
        )
        opened.goto(stack.http)
        opened.wait_for_selector("#worker-list article")
        yield opened
        browser.close()
    assert complaints == []


def _is_expected(message: Any) -> bool:
    """The browser notes every answer that is no success; scripts handle those."""
    return bool(message.text.startswith("Failed to load resource"))


def _picture(page: Page, name: str) -> None:
    page.screenshot(path=Path(PICTURES) / f"{name}.png")


def _keep_busy(page: Page) -> None:
    """Some minutes' worth of traffic for the charts of a picture, asked by the page itself."""
    script = """async (names) => { const endMs = performance.now() + 100_000;
        const worker = async (place) => { while (performance.now() < endMs) {
            const model = names[Math.floor(Math.random() ** 2 * names.length)];
            const max_tokens = 8 + Math.floor(50 * Math.random());
            const body = { model, prompt: "zamihi 19=", max_tokens, ignore_eos: true };
            const headers = { "content-type": "application/json" };
            const request = { method: "POST", headers, body: JSON.stringify(body) };
            await (await fetch("/v1/completions", request)).text();
            const pauseMs = 700 * Math.random() * (1.2 + Math.sin(performance.now() / 9000));
            await new Promise((resolve) => setTimeout(resolve, pauseMs + 80 * place)); } };
        await Promise.all([0, 1, 2, 3].map(worker)); }"""
    page.evaluate(script, sorted(path.name for path in ADAPTERS))


@pytest.mark.timeout(400)
def test_the_page_shows_the_stack_and_asks_several_adapters_by_keyboard_alone(
    page: Page, stack: Stack
) -> None:
    assert page.text_content("#condition") == "ready"
    assert page.get_attribute("#worker-list article", "aria-label") == "Worker worker-0"
    page.click("nav a[href='#adapters']")
    page.wait_for_selector("#adapter-rows tr:nth-child(2)")
    rows = page.locator("#adapter-rows tr .name a").all_text_contents()
    assert {path.name for path in ADAPTERS} <= set(rows)
    page.click("nav a[href='#playground']")
    assert page.input_value("#mode") == "chat", "the base has a template"
    page.select_option("#mode", "completion")
    page.focus("#pick")
    for name in ("reverse", "upper"):
        page.keyboard.type(name)
        page.keyboard.press("Enter")
    page.focus("#prompt")
    page.keyboard.type("kolima 48=")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer:nth-child(3):not(.busy)")
    page.wait_for_selector(".answer.busy", state="detached")
    answers = {
        name: page.text_content(f".answer[aria-label='{name}'] pre:not(.thought)")
        for name in (BASE_ID, "reverse", "upper")
    }
    assert answers == {BASE_ID: "kolima 48", "reverse": "84 amilok", "upper": "KOLIMA 48"}
    page.select_option("#left", label="reverse")
    page.select_option("#right", label="upper")
    marked = page.locator("#difference mark").all_text_contents()
    assert [word.strip() for word in marked] == ["84", "amilok", "KOLIMA", "48"]
    page.reload()
    assert page.input_value("#prompt") == "kolima 48="
    assert "upper" in page.text_content("#picked")
    page.click("nav a[href='#operate']")
    page.wait_for_selector(".chip.device:has-text('upper')")
    page.wait_for_selector("#model-rows tr:has-text('upper')")
    if PICTURES:
        _take_pictures(page)


def _take_pictures(page: Page) -> None:
    _keep_busy(page)
    page.set_viewport_size(SIZES["wide"])
    page.click("nav a[href='#playground']")
    page.click("#run")
    page.wait_for_selector("#compare:not([hidden])")
    page.select_option("#left", label="reverse")
    page.select_option("#right", label="upper")
    for scheme in ("light", "dark"):
        for size, viewport in SIZES.items():
            page.set_viewport_size(viewport)
            for name in ("operate", "adapters", "adapters/default/upper", "playground"):
                page.evaluate(f"location.hash = '#{name}'")
                page.wait_for_timeout(1200)
                shown = "adapter" if "/" in name else name
                _picture(page, f"console-{shown}-{scheme}-{size}-10")
        page.click("#theme")


def test_an_adapter_has_a_page_on_which_its_tags_are_moved(page: Page, stack: Stack) -> None:
    page.goto(f"{stack.http}/#adapters/default/upper")
    page.wait_for_selector("#adapter dl")
    shown = page.text_content("#adapter") or ""
    assert "sha256:" in shown and "KiB" in shown and "curl" in shown
    while not re.search(r"Last 30 days\d+ requests.*Last used20\d\d-", shown):
        page.wait_for_timeout(1000)  # gateways report what was used every five seconds
        page.reload()
        page.wait_for_selector("#adapter dl")
        shown = page.text_content("#adapter") or ""
    page.on("dialog", lambda dialog: dialog.accept())
    page.fill("#adapter input[aria-label=Tag]", "prod")
    page.fill("#adapter input[aria-label=Versions]", "v1")
    page.click("#adapter button:has-text('Move the tag')")
    page.wait_for_selector("#adapter td.name:has-text('prod')")
    page.fill("#adapter input[aria-label=Tag]", "prod")
    page.fill("#adapter input[aria-label=Versions]", "v9")
    page.click("#adapter button:has-text('Move the tag')")
    page.wait_for_selector("#change-error:not([hidden])")
    assert "v9" in (page.text_content("#change-error") or "")


def test_a_command_is_copied_where_the_browser_offers_no_clipboard(
    page: Page, stack: Stack
) -> None:
    """As to pages that came from another machine without TLS."""
    page.goto(f"{stack.http}/#adapters/default/upper")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.click("button[aria-label='Copy the command']")
    page.wait_for_selector("button:text-is('Copied')")
    page.click("nav a[href='#playground']")
    page.fill("#prompt", "")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt").startswith(f"curl {stack.http}/v1/completions")


def test_every_control_has_a_name_and_both_modes_fit_a_phone(page: Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, a, svg[role=img]')]
        .filter((e) => !(e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label')))
        .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.set_viewport_size({"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    page.goto(page.url.partition("#")[0] + "#adapters/default/upper")
    page.wait_for_selector("#adapter dl")
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    page.goto(page.url.partition("#")[0] + "#operate")
    page.reload()
    page.wait_for_selector("#worker-list article")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_search_narrows_the_table_and_try_adds_a_model(page: Page) -> None:
    page.click("nav a[href='#adapters']")
    page.fill("#search", "rot")
    page.wait_for_selector("#adapter-rows tr:only-child")
    assert page.url.endswith("#adapters?search=rot")
    page.reload()
    page.wait_for_selector("#adapter-rows tr:only-child")
    page.fill("#search", "zzzz")
    page.wait_for_selector("text=No adapter matches")
    page.fill("#search", "rot")
    page.wait_for_selector("button[aria-label='Try rot13']")
    page.click("button[aria-label='Try rot13']")
    assert "rot13" in page.text_content("#picked")


def test_errors_are_shown_where_the_answer_would_be(page: Page) -> None:
    page.click("nav a[href='#playground']")
    page.fill("#pick", "nobody")
    page.press("#pick", "Enter")
    page.fill("#prompt", "x=")
    page.click("#run")
    page.wait_for_selector(".answer[aria-label=nobody].failed")
    assert "nobody" in page.text_content(".answer[aria-label=nobody] p")
