"""Threads that tenants get in rotation."""

from __future__ import annotations

import threading

import pytest

from loraplex_services.worker.grammars.tenant_threads import TenantThreads

pytestmark = pytest.mark.hostile
STACK_BYTES = 1 << 20


def test_work_of_one_tenant_that_does_not_end_leaves_a_thread_to_the_others() -> None:
    threads, end = TenantThreads(2, "test", STACK_BYTES), threading.Event()
    stuck = [threads.submit("globex", end.wait) for _ in range(8)]
    assert threads.submit("acme", lambda: "done").result(timeout=30) == "done"
    assert not any(future.done() for future in stuck)
    end.set()
    assert all(future.result(timeout=30) for future in stuck)


def test_tenants_that_wait_get_a_thread_in_rotation() -> None:
    threads, end, order = TenantThreads(1, "test", STACK_BYTES), threading.Event(), list[str]()
    first = threads.submit("globex", end.wait)
    waiting = [
        threads.submit(tenant, order.append, tenant)
        for tenant in ("globex", "globex", "globex", "acme", "initech", "acme")
    ]
    end.set()
    assert first.result(timeout=30)
    for future in waiting:
        future.result(timeout=30)
    assert order == ["globex", "acme", "initech", "globex", "acme", "globex"]


def test_work_that_was_cancelled_does_not_run_and_errors_reach_their_caller() -> None:
    threads, end, ran = TenantThreads(1, "test", STACK_BYTES), threading.Event(), list[int]()
    threads.submit("globex", end.wait)
    cancelled = threads.submit("globex", ran.append, 1)
    failing = threads.submit("globex", int, "x")
    assert cancelled.cancel()
    end.set()
    assert isinstance(failing.exception(timeout=30), ValueError)
    assert threads.submit("globex", len, ran).result(timeout=30) == 0
