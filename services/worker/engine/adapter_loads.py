"""Loads adapters into the arena: packs and copies them while steps run.

The cache decides what is loaded. This module carries out its decisions and reports the results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from loraplex.errors import InvalidRequest, LoraplexError, ResourceExhausted
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.engine.adapter_checks import BaseFacts, admit
from loraplex_services.worker.scheduling.early_abort import ServiceTimes
from loraplex_services.worker.types.messages import AdapterFetched
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.residency import Load
from loraplex_services.worker.types.runner_protocol import Copied, Pending, Runner

logger = logging.getLogger(__name__)

MAX_WAIT_SHARE = 0.5
"""Longest wait of a step for loads, as a share of the step's duration."""
MAX_IDLE_WAIT_S = 0.02
"""Longest wait in seconds if nothing else is to be computed: commands may arrive in the
meantime."""

T = TypeVar("T")
Failures = list[tuple[str, LoraplexError]]
"""Digests, and why the requests that wait for them fail."""


class AdapterLoads:
    """The packs and copies in progress. No method blocks except `await_copies`."""

    def __init__(self, runner: Runner, cache: AdapterCache, times: ServiceTimes) -> None:
        self._runner = runner
        self._cache = cache
        self._times = times
        self._packing: dict[str, tuple[AdapterFetched, Pending[int]]] = {}
        self._copying: list[tuple[Load, Pending[Copied]]] = []
        self._pins: dict[str, bool] = {}
        """Whether to pin adapters that are to be loaded as soon as they are packed."""
        self._awaited_since_s: dict[str, float] = {}
        """Adapters that requests needed before they were on disk, and since when."""
        self._copies_s: list[float] = []
        self._loaded: list[str] = []
        self._on_host: dict[Path, str] = {}
        """Digests of the adapters in pinned host memory, by folder."""
        self.host_bytes: dict[str, int] = {}
        """Sizes of these adapters by digest."""
        self._moved_on_host: set[str] = set()
        self.refused: dict[str, LoraplexError] = {}
        """Why adapters that were to be loaded ahead of requests could not be."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when a pack or a copy has ended."""
        self.prefetched: Callable[[str, int], None] = lambda digest, num_pages: None
        """Called from any thread when an adapter that is loaded ahead of requests was copied. The
        next step can use it; the step that runs meanwhile may take longer than the copy."""
        self._prefetches: set[str] = set()
        """Adapters to be loaded ahead of requests, until they are copied."""

    def awaited(self, digest: str, now: float) -> None:
        """Note that a request has arrived for an adapter that may not be on disk yet."""
        if not self._cache.known([digest]):
            self._awaited_since_s.setdefault(digest, now)

    def fetched(self, command: AdapterFetched, now: float) -> Failures:
        """Note that an adapter is on disk. Pack it here if the API server process could not do
        it."""
        if (since_s := self._awaited_since_s.pop(command.digest, None)) is not None:
            self._times.fetches.add(now - since_s)
        adapter = self._cache.get(command.digest)
        if num_pages := adapter.num_pages if adapter else command.num_pages:
            return self._is_here(command, num_pages)
        if command.digest not in self._packing:
            pending = self._runner.pack_adapter(Path(command.path))
            pending.add_done_callback(lambda _: self.wake())
            self._packing[command.digest] = command, pending
        return self._packed(now)

    def fetch_failed(self, digest: str) -> None:
        """Note that no request waits for an adapter any more."""
        self._awaited_since_s.pop(digest, None)

    def gone(self, digest: str) -> None:
        """Drop the result of packing an adapter whose files are about to be deleted."""
        self._packing.pop(digest, None)
        self._pins.pop(digest, None)
        self._prefetches.discard(digest)

    def prefetch(self, digest: str, pin: bool, now: float) -> None:
        """Load an adapter ahead of requests, once it is packed."""
        if digest in self._packing:
            self._pins[digest] = pin or self._pins.get(digest, False)
        if not self._cache.known([digest]):
            return
        try:
            if pin:
                self._cache.pin(digest, now)
            self._cache.prefetch(digest)
            if not self._cache.ready([digest]):
                self._prefetches.add(digest)
        except ResourceExhausted as error:
            self.refused[digest] = error

    def carry_out(self, step_s: float) -> bool:
        """Begin the copies that the cache has decided on, and carry out its evictions.

        Args:
            step_s: duration of a step, in seconds.

        Returns:
            Whether there were any.
        """
        actions = self._cache.take_actions()
        for action in actions:
            if isinstance(action, Load):
                pending = self._runner.copy_adapter(action.path, action.extents, step_s)
                pending.add_done_callback(partial(self._copy_ended, action))
                self._copying.append((action, pending))
            else:
                self._runner.unload_adapter(action.slot)
        return bool(actions)

    def _copy_ended(self, load: Load, pending: Pending[Copied]) -> None:
        """Called on the thread of the copy."""
        if load.digest in self._prefetches:
            copied = _result(pending)
            if not isinstance(copied, Exception) and copied.failure is None:
                self.prefetched(load.digest, load.extents.num_pages)
        self.wake()

    def await_copies(self, num_rows: int, num_wanted: int, step_s: float) -> bool:
        """Wait for the copies in progress if that gains more than it costs: it delays all rows of
        the step that is about to run, but requests whose adapters arrive need not wait for the next
        step. Returns False if there was nothing to wait for, or if the wait would have been too
        long by recent measurements.

        Where steps overlap, the previous step runs in the meantime, so a short wait costs nothing.

        Args:
            num_rows: requests of the step whose adapters are on the device.
            num_wanted: requests that would join it. A step never waits for adapters that are copied
                ahead of requests that cannot start yet.
            step_s: how long a step takes.
        """
        num_wanted = min(num_wanted, len(self._copying))
        if not num_wanted:
            return False
        patience_s = MAX_IDLE_WAIT_S
        if num_rows and self._runner.overlaps:
            patience_s = MAX_WAIT_SHARE * step_s
        else:
            if num_rows:
                patience_s = min(num_wanted / num_rows, MAX_WAIT_SHARE) * step_s
            if len(self._copying) * self._times.copies.quantile(0.5) > patience_s:
                return False
        self._runner.await_copies(patience_s)
        return True

    def collect(self, now: float) -> Failures:
        """Process what has ended since the last call: packed adapters may now load, and copied ones
        may serve."""
        return self._packed(now) + self._copied(now)

    def take_loaded(self) -> list[str]:
        """Digests that have reached the device since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def take_moved_on_host(self) -> set[str]:
        """Digests that have entered or left pinned host memory since the last call."""
        moved, self._moved_on_host = self._moved_on_host, set()
        return moved

    def refusals(
        self, requests: Sequence[Request], base: BaseFacts
    ) -> list[tuple[Request, LoraplexError]]:
        """Requests that may not run with their adapters, all of which are on the device. Applies to
        all other requests what their adapters change."""
        refused: list[tuple[Request, LoraplexError]] = []
        for request in requests:
            digests = request.adapters.digests
            if digests and self._cache.ready(digests):
                try:
                    admit(request, self._cache.facts(digests), base)
                except InvalidRequest as error:
                    refused.append((request, error))
        return refused

    def take_copies_s(self) -> list[float]:
        """Duration in seconds of each copy since the last call."""
        copies_s, self._copies_s = self._copies_s, []
        return copies_s

    def _packed(self, now: float) -> Failures:
        failures: Failures = []
        for command, pending in list(self._packing.values()):
            if not pending.done():
                continue
            del self._packing[command.digest]
            pin = self._pins.pop(command.digest, None)
            num_pages = _result(pending)
            if isinstance(num_pages, Exception):
                failures.append((command.digest, _load_error(num_pages, command.digest)))
                continue
            failures += self._is_here(command, num_pages)
            if pin is not None:
                self.prefetch(command.digest, pin, now)
        return failures

    def _is_here(self, command: AdapterFetched, num_pages: int) -> Failures:
        path = Path(command.path)
        try:
            self._cache.fetched(command.digest, path, num_pages, command.max_rank)
        except ResourceExhausted as error:
            return [(command.digest, error)]
        return []

    def _copied(self, now: float) -> Failures:
        failures: Failures = []
        under_way, self._copying = self._copying, []
        for load, pending in under_way:
            if not pending.done():
                self._copying.append((load, pending))
                continue
            self._prefetches.discard(load.digest)
            try:
                copied = pending.result()
                self._note_host(load, copied)
                self._runner.enter_adapter(load.slot, copied)
            except Exception as failure:
                error = _load_error(failure, load.digest)
                self._cache.failed(load.digest, error, now)
                failures.append((load.digest, error))
            else:
                self._cache.loaded(load.digest, copied.elapsed_s, copied.facts)
                self._loaded.append(load.digest)
                self._copies_s.append(copied.elapsed_s)
                self._times.copies.add(copied.ready_s)
        return failures

    def _note_host(self, load: Load, copied: Copied) -> None:
        left = [self._on_host.pop(folder) for folder in copied.left_host if folder in self._on_host]
        for digest in left:
            del self.host_bytes[digest]
        self._moved_on_host.update(left)
        if copied.is_on_host and load.path not in self._on_host:
            self._on_host[load.path] = load.digest
            self.host_bytes[load.digest] = copied.num_bytes
            self._moved_on_host.add(load.digest)


def _result(pending: Pending[T]) -> T | Exception:
    try:
        return pending.result()
    except Exception as failure:
        return failure


def _load_error(failure: Exception, digest: str) -> LoraplexError:
    """The error of requests whose adapter cannot be packed or copied."""
    if isinstance(failure, LoraplexError):
        return failure
    logger.error("adapter load failed", exc_info=failure, extra={"digest": digest})
    return LoraplexError(f"adapter {digest} could not be loaded", reason="ADAPTER_LOAD_FAILED")
