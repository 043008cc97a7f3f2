"""The state of a running request that may change from outside: its adapters, and whether it may
run.

The choices of a request share one `Steering`. A change interrupts the current attempts at their
workers. The relay then submits the request again with the tokens that were emitted, just as after a
failed worker, so each attempt has one set of adapters, and each token is known to come from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loraplex.api.request import AdapterSet
from loraplex.errors import DeadlineExceeded, LoraplexError
from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.gateway.clock import now_s


class Interrupted(LoraplexError):
    """An attempt was ended on purpose. This exception never leaves the gateway."""

    reason = "INTERRUPTED"


@dataclass(slots=True)
class Attempt:
    """A choice of a request at a worker."""

    has_tokens: bool = False
    """Whether tokens of it were taken."""


class Steering:
    """The desired state of one request."""

    def __init__(self, adapters: AdapterSet, *, keeps_prefix: bool = False) -> None:
        """`keeps_prefix`: after a switch, cached KV of the old adapters is used."""
        self.adapters = adapters
        self.keeps_prefix = keeps_prefix
        self.is_aborted = False
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._attempts: dict[Callable[[LoraplexError], None], str] = {}
        """Functions that end an attempt, with the address of its worker."""
        self.used_addresses: set[str] = set()
        """Addresses of all workers that have run the request."""
        self.used: NonzeroCounter[str] = NonzeroCounter()
        """Digests of adapters that have computed tokens, or may still do so in an attempt."""

    @property
    def addresses(self) -> set[str]:
        """Addresses of the workers that run the request now."""
        return set(self._attempts.values())

    @contextmanager
    def attempt(
        self, address: str, adapters: AdapterSet, end: Callable[[LoraplexError], None]
    ) -> Iterator[Attempt]:
        """An attempt on a worker. `end` ends it there immediately, even if its reader learns of
        that later.

        Raises: Interrupted if that is not what is wanted any more.
        """
        if self.is_aborted or not self._may_run.is_set() or adapters != self.adapters:
            raise Interrupted("interrupted")
        self._attempts[end] = address
        self.used_addresses.add(address)
        attempt = Attempt()
        self.used.update(adapters.digests)
        try:
            yield attempt
        finally:
            self._attempts.pop(end, None)
            if not attempt.has_tokens:
                self._give_back(adapters)

    def _give_back(self, adapters: AdapterSet) -> None:
        """Undo the count of an attempt that gave no tokens."""
        for digest in adapters.digests:
            self.used.remove(digest)

    def switch(self, adapters: AdapterSet) -> None:
        """Continue with other adapters."""
        self.adapters = adapters
        self._interrupt()

    def hold(self) -> None:
        """Pause: no worker computes more tokens."""
        self._may_run.clear()
        self._interrupt()

    def release(self) -> None:
        """Continue after `hold`."""
        self._may_run.set()

    def abort(self) -> None:
        """End the request with the output so far."""
        self.is_aborted = True
        self._may_run.set()
        self._interrupt()

    async def until_running(self, deadline_s: float) -> None:
        """Wait while the request is held. Raises: DeadlineExceeded."""
        if self._may_run.is_set():
            return
        try:
            async with asyncio.timeout(max(deadline_s - now_s(), 0.0)):
                await self._may_run.wait()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the model was paused") from None

    def _interrupt(self) -> None:
        attempts, self._attempts = self._attempts, {}
        for end in attempts:
            end(Interrupted("interrupted"))
