"""A few threads that tenants get in rotation, for work that one tenant can make slow.

A tenant gets at most all threads but one. However slow its grammars are, the work of another tenant
begins immediately as long as only one tenant sends slow work.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from loraplex_services.common.nonzero_counter import NonzeroCounter

T = TypeVar("T")
Task = Callable[[], None]


class TenantThreads:
    """Runs functions in threads, in rotation by tenant."""

    def __init__(self, num_threads: int, name: str, stack_bytes: int) -> None:
        self._most_held = max(1, num_threads - 1)
        self._num_free = num_threads
        self._held: NonzeroCounter[str] = NonzeroCounter()
        self._waiting: OrderedDict[str, deque[Task]] = OrderedDict()
        """Tasks by tenant; the tenant that is next comes first."""
        self._lock = threading.Lock()
        self._threads = _executor(num_threads, name, stack_bytes)

    def submit(self, tenant: str, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run `function(*args)` when it is the tenant's turn. Cancel the future to withdraw it."""
        future: Future[T] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args)
            except BaseException as failure:
                future.set_exception(failure)
            else:
                future.set_result(result)

        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(task)
            self._grant()
        return future

    def _grant(self) -> None:
        """Give tasks to free threads. The caller holds the lock."""
        while self._num_free:
            tenant = next((t for t in self._waiting if self._held[t] < self._most_held), None)
            if tenant is None:
                return
            task = self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            self._num_free -= 1
            self._held[tenant] += 1
            self._threads.submit(self._run, tenant, task)

    def _run(self, tenant: str, task: Task) -> None:
        try:
            task()
        finally:
            with self._lock:
                self._num_free += 1
                self._held.remove(tenant)
                self._grant()


def _executor(num_threads: int, name: str, stack_bytes: int) -> ThreadPoolExecutor:
    """Threads that have started, with stacks of this size."""
    before = threading.stack_size(stack_bytes)
    try:
        pool = ThreadPoolExecutor(num_threads, name)
        started = threading.Barrier(num_threads + 1)
        for _ in range(num_threads):
            pool.submit(started.wait)  # each thread waits for the others, so that all are started
        started.wait()
    finally:
        threading.stack_size(before)
    return pool
