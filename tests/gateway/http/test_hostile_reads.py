"""Lists and reports that one tenant reads again and again."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest

from loraplex.v1 import registry_pb2
from loraplex_services.common.grpc import call_rates
from loraplex_services.common.limits import LIST_CALLS
from tests.gateway.conftest import Stack, eventually

pytestmark = pytest.mark.hostile
KEYS = {tenant: f"lpx_{tenant:08}_" + "k" * 32 for tenant in ("acme", "globex")}


async def _start_with_keys(stack: Stack) -> None:
    stack.wants_keys = True
    stack.registry.keys = {
        key: registry_pb2.Key(key_id=f"{tenant}1", tenant=tenant, scopes=["reader"])
        for tenant, key in KEYS.items()
    }
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")


async def _status(stack: Stack, path: str, tenant: str) -> int:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}

    def get() -> int:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(urllib.request.Request(stack.url + path, headers=headers)) as found:
                return int(found.status)
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(get)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/usage", "/console/state", "/console/adapters"])
async def test_reads_of_a_tenant_beyond_its_rate_are_refused_before_any_work(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    await _start_with_keys(stack)
    monkeypatch.setattr(call_rates, "CALL_BURST", 2 * LIST_CALLS)
    monkeypatch.setattr(call_rates, "CALLS_PER_S", 1e-6)
    monkeypatch.setattr(call_rates, "REFUSAL_DELAY_S", 0.0)
    statuses = await asyncio.gather(*(_status(stack, path, "globex") for _ in range(12)))
    assert statuses.count(429) >= 10
    assert set(statuses) == {await _status(stack, path, "acme"), 429}
