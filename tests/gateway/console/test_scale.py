"""The console with 10,000 adapters and 50 workers in a real browser, wide and on a phone.

    CONSOLE_PICTURES=FOLDER .venv/bin/pytest -m long tests/gateway/console/test_scale.py

also keeps pictures.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.residency import AdapterResidency, Tier
from loraplex.api.wire import residency_to_proto
from tests.gateway.conftest import Stack, eventually
from tests.gateway.console.test_keys import BROWSER, SWITCHES
from tests.gateway.scripted_registry import digest_of
from tests.gateway.scripted_worker import ScriptedWorker

NUM_ADAPTERS, NUM_WORKERS, HELD_BY_EACH = 10_000, 50, 200
PICTURES = os.environ.get("CONSOLE_PICTURES", "")
"""Folder for pictures; empty = none are kept."""
SIZES = {"wide": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
TEAMS = ("billing", "search", "support", "legal", "sales")
TASKS = ("summaries", "intent", "sql", "tone", "routing", "translation-into-plain-english")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not BROWSER, reason="no chromium on PATH: apt-get install -y chromium"),
]


def _names() -> list[str]:
    return [f"{TEAMS[n % len(TEAMS)]}-{TASKS[n % len(TASKS)]}-{n:05d}" for n in range(NUM_ADAPTERS)]


async def _start(stack: Stack) -> list[str]:
    """Start a fleet that holds adapters, and give it some traffic. Returns the names."""
    names = _names()
    for number, name in enumerate(names):
        stack.registry.put(name, labels={"team": name.partition("-")[0]})
        if number % 40 == 0:
            stack.registry.put(name, 2, labels={"team": name.partition("-")[0]})
            stack.registry.tag(name, "prod", {1: 90, 2: 10})
    stack.workers = [ScriptedWorker(f"worker-{n:02d}", step_s=0.002) for n in range(NUM_WORKERS)]
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "", 60)
    await stack.until_ready(NUM_WORKERS)
    chance = random.Random(7)
    for worker in stack.workers:
        worker.total_blocks, worker.free_blocks, worker.idle_blocks = 1000, 640, 410
        held = chance.sample(names, HELD_BY_EACH)
        residencies = (
            AdapterResidency(digest_of(name, 1), Tier.DEVICE, 8, running_requests=int(n < 3))
            for n, name in enumerate(held)
        )
        worker.held = tuple(map(residency_to_proto, residencies))
        worker.publish(*worker.held)
    asked = [names[int(len(names) * chance.random() ** 6)] for _ in range(400)]

    async def ask(name: str) -> None:
        await asyncio.sleep(chance.random() * 12)
        await stack.openai().completions.create(model=name, prompt="zamihi", max_tokens=16)

    await asyncio.gather(*map(ask, asked))
    return names


async def test_every_page_fits_at_ten_thousand_adapters_and_fifty_workers(stack: Stack) -> None:
    api = pytest.importorskip("playwright.async_api", reason="pip install playwright")
    names = await _start(stack)
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=BROWSER, args=SWITCHES)
        for scheme in ("light", "dark"):
            for size, viewport in SIZES.items():
                page = await browser.new_page(viewport=viewport, color_scheme=scheme)
                page.set_default_timeout(30_000)
                complaints: list[str] = []
                page.on("pageerror", lambda error, kept=complaints: kept.append(str(error)))
                await _look(page, stack.url, names, f"{scheme}-{size}", viewport["width"])
                assert complaints == []
                await page.close()
        await browser.close()


async def _look(page: Any, url: str, names: list[str], kind: str, width: int) -> None:
    """All three pages, by their own addresses."""
    await page.goto(f"{url}/#operate?range=5m")
    await page.wait_for_selector("#worker-list article")
    assert await page.locator("#worker-list article").count() == NUM_WORKERS
    assert await page.inner_text("#condition") == "ready"
    await page.wait_for_selector("#charts .line")
    await _fits(page, f"operate-{kind}", width)
    await page.goto(f"{url}/#adapters?sort=requests")
    await page.wait_for_selector("#adapter-rows tr:nth-child(50)")
    assert await page.inner_text("#adapter-count") == "10,000"
    assert await page.inner_text("#page-number") == "1 of 200"
    await _fits(page, f"adapters-{kind}", width)
    await page.fill("#search", "team=legal")
    await page.wait_for_selector("text=1 of 40")
    await page.fill("#search", names[-1])
    await page.wait_for_selector("#adapter-rows tr:only-child")
    await page.goto(f"{url}/#playground")
    await page.fill("#pick", names[0])
    await page.press("#pick", "Enter")
    await page.fill("#prompt", "zamihi 19")
    await page.click("#run")
    await page.wait_for_selector(".answer:nth-child(2):not(.busy)")
    await page.wait_for_selector("#difference .answer")
    await _fits(page, f"playground-{kind}", width)


async def _fits(page: Any, name: str, width: int) -> None:
    """Nothing is wider than the screen, and a picture if they are kept."""
    assert await page.evaluate("document.documentElement.scrollWidth") == width, name
    if PICTURES:
        await page.wait_for_timeout(600)
        await page.screenshot(path=Path(PICTURES) / f"console-{name}-10000.png")
