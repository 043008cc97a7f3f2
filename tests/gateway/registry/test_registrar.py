"""Bases are registered again until the registry accepts them."""

from __future__ import annotations

import pytest

from loraplex.errors import ResourceExhausted
from loraplex_services.gateway.registry import registrar
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import ScriptedWorker


async def test_the_refusal_of_each_base_is_logged_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registrar, "_RETRY_S", 0.01)
    stack.workers = [ScriptedWorker("w0", "first"), ScriptedWorker("w1", "second")]
    stack.registry.refuses_bases = ResourceExhausted("no more bases")
    await stack.start(ready=False)
    registering = stack.running._registrar
    await eventually(lambda: "first" in registering.missing and "second" in registering.missing)
    num_asked = stack.registry.num_refused_bases
    await eventually(lambda: stack.registry.num_refused_bases > num_asked + 4)
    refused = [vars(e)["base"] for e in caplog.records if e.message == "base not registered"]
    assert sorted(refused) == ["first", "second"]
    stack.registry.refuses_bases = None
    await eventually(lambda: not registering.missing)
