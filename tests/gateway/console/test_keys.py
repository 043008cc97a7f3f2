"""The console's key dialog in a real browser, on a gateway that asks for keys."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from loraplex.v1 import registry_pb2
from tests.gateway.conftest import Stack, eventually

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or ""
SWITCHES = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
READER = "lpx_reader01_" + "r" * 32
ADMIN = "lpx_admin001_" + "a" * 32
UNKNOWN = "lpx_nobody01_" + "n" * 32

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not BROWSER, reason="no chromium on PATH: apt-get install -y chromium"),
]


async def _give(page: Any, key: str) -> None:
    """Type a key into the open dialog, by keyboard alone."""
    await page.wait_for_selector("#key-dialog[open]")
    assert await page.evaluate("document.activeElement.id") == "key-input"
    await page.keyboard.type(key)
    await page.keyboard.press("Enter")


async def test_the_page_asks_for_a_key_until_it_has_a_good_one(stack: Stack) -> None:
    api = pytest.importorskip("playwright.async_api", reason="pip install playwright")
    stack.wants_keys = True
    stack.registry.keys = {
        READER: registry_pb2.Key(key_id="reader01", tenant="acme", scopes=["reader"]),
        ADMIN: registry_pb2.Key(key_id="admin001", tenant="acme", scopes=["admin"]),
    }
    stack.registry.put("mine", tenant="acme")
    stack.registry.put("theirs", tenant="other")
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=BROWSER, args=SWITCHES)
        page = await browser.new_page()
        page.set_default_timeout(30_000)
        await page.goto(f"{stack.url}/#adapters")
        await _give(page, UNKNOWN)
        await page.wait_for_selector("#key-error:not([hidden])")
        assert await page.inner_text("#key-error") == "This key is not known here."
        await _give(page, READER)
        await page.wait_for_selector("text=mine")
        assert await page.locator("text=theirs").count() == 0
        await page.click("nav a[href='#operate']")
        await page.wait_for_selector("text=Use a key with the scope admin to see the workers")
        assert READER not in await page.evaluate("JSON.stringify(localStorage) + document.cookie")
        await page.click("#key")
        await _give(page, ADMIN)
        await page.wait_for_selector("#worker-list article")
        await page.reload()
        await page.wait_for_selector("#worker-list article")
        other = await browser.new_page()
        await other.goto(stack.url)
        await other.wait_for_selector("#key-dialog[open]")
        await browser.close()
