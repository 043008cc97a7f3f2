"""Prevents a request that crashes engines from crashing more than two.

When an engine crashes, every request in its batch is a suspect. Gateways send them again. A suspect
is then admitted alone, and the next one only after its first token. A request that was in the batch
of two crashes is refused. Requests are identified by a hash of prompt and adapters, which never
leaves this module.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from loraplex.api.request import AdapterSet
from loraplex.errors import LoraplexError

MAX_DEATHS = 2
MAX_SUSPECTS = 4096
"""Number of crash keys that are remembered; the oldest are forgotten first."""

CrashKey = bytes


def crash_key(prompt_ids: Sequence[int], adapters: AdapterSet) -> CrashKey:
    """Equal for a request and its repetitions."""
    tokens = array("q", prompt_ids).tobytes()
    return hashlib.sha256(adapters.key().encode() + tokens).digest()


class CrashGuard:
    """Counts crashes by request, and admits suspects one at a time."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[CrashKey, int] = OrderedDict()
        self._on_trial: str | None = None
        self._held: OrderedDict[str, Callable[[], None]] = OrderedDict()

    def check(self, key: CrashKey) -> None:
        """Raises LoraplexError (INTERNAL) for a request that was in the batch of too many
        crashes."""
        if self._deaths.get(key, 0) >= MAX_DEATHS:
            raise LoraplexError(
                f"the engine crashed {MAX_DEATHS} times while it computed this request, which is "
                "not retried: change its prompt or adapters, and report the worker's log",
                reason="ENGINE_CRASHED",
            )

    def admit(self, request_id: str, key: CrashKey, send: Callable[[], None]) -> None:
        """Call `send` now, or, for a suspect, once the suspects before it have proved harmless."""
        if key not in self._deaths:
            send()
        elif self._on_trial is None:
            self._on_trial = request_id
            send()
        else:
            self._held[request_id] = send

    def settled(self, request_id: str) -> None:
        """Note that the request has a token or has ended, so that the next suspect may be
        admitted."""
        self._held.pop(request_id, None)
        if request_id != self._on_trial:
            return
        self._on_trial = None
        if self._held:
            self._on_trial, send = self._held.popitem(last=False)
            send()

    def finished(self, key: CrashKey) -> None:
        """Note that the request has ended, so that it is no longer a suspect."""
        self._deaths.pop(key, None)

    def engine_lost(self) -> None:
        """Forget which suspects were running or waiting: the engine has ended."""
        self._on_trial = None
        self._held.clear()

    def crashed(self, keys: Iterable[CrashKey]) -> None:
        """Note that an engine crashed with these requests in its batch."""
        for key in set(keys):
            self._deaths[key] = self._deaths.pop(key, 0) + 1
        while len(self._deaths) > MAX_SUSPECTS:
            self._deaths.popitem(last=False)
