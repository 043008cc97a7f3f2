"""Templates that run out of time do not hold the processes that all tenants share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import TEMPLATES
from loraplex_services.gateway.text.template_pool import TemplatePool

pytestmark = pytest.mark.hostile

LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TIMEOUT_S = 1.0
"""Short for a loop, and long enough for a small template on a busy machine."""


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    """Of one process; jobs wait for it however long it takes to start on a busy machine."""
    limits = replace(TEMPLATES, num_processes=1, timeout_s=TIMEOUT_S, max_wait_s=60.0)
    made = TemplatePool(limits)
    yield made
    await made.close()


async def _refusal(pool: TemplatePool, template: str, *, is_adapters: bool) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await pool.render(template, {}, is_adapters=is_adapters)
    return caught.value.message


async def test_looping_template_of_an_adapter_runs_once_for_many_requests(
    pool: TemplatePool,
) -> None:
    requests = [_refusal(pool, LOOPING, is_adapters=True) for _ in range(6)]
    said = await asyncio.gather(*requests)
    assert sum(f"took longer than {TIMEOUT_S:g} s" in message for message in said) == 1
    assert sum("a moment ago" in message for message in said) == 5
    assert await pool.render("{{ 1 + 1 }}", {}, is_adapters=True) == "2"


async def test_one_slow_conversation_does_not_end_the_chats_of_a_base(pool: TemplatePool) -> None:
    template = "{% if loops %}" + LOOPING + "{% endif %}fine"
    with pytest.raises(InvalidRequest, match="took longer"):
        await pool.render(template, {"loops": True})
    assert await pool.render(template, {"loops": False}) == "fine"


async def test_slow_conversations_of_one_tenant_do_not_delay_the_chats_of_another() -> None:
    pool = TemplatePool(replace(TEMPLATES, num_processes=2, timeout_s=5.0))
    try:
        await pool.render("warm", {}, tenant="acme")
        slow = [asyncio.create_task(pool.render(LOOPING, {}, tenant="globex")) for _ in range(4)]
        await asyncio.sleep(0)
        for number in range(5):
            assert await pool.render("{{ n }}", {"n": number}, tenant="acme") == str(number)
        assert not any(task.done() for task in slow)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await pool.close()


async def test_a_template_that_needs_much_memory_is_refused_and_the_next_is_rendered() -> None:
    pool = TemplatePool(replace(TEMPLATES, num_processes=1, timeout_s=60.0))
    try:
        with pytest.raises(InvalidRequest, match="memory"):
            await pool.render("{{ ('x' * 999999999) | length }}", {}, is_adapters=True)
        assert await pool.render("fine", {}, is_adapters=True) == "fine"
    finally:
        await pool.close()
