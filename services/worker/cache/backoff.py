"""Remembers failures and when to try again. Pure; the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.errors import LoraplexError


@dataclass(slots=True)
class _Failure:
    error: LoraplexError
    attempts: int
    retry_at_s: float


class Backoff:
    """Failures by key, each with a pause that doubles from one second to `max_s`."""

    def __init__(self, max_s: float = 60.0, max_keys: int = 10_000) -> None:
        self._max_s = max_s
        self._max_keys = max_keys
        self._failures: dict[str, _Failure] = {}

    def record(self, key: str, error: LoraplexError, now: float) -> None:
        """Note a failure. The next attempt is refused until the pause is over."""
        past = self._failures.pop(key, None)
        attempts = past.attempts + 1 if past else 1
        pause_s = min(self._max_s, 2.0 ** min(attempts - 1, 30))
        self._failures[key] = _Failure(error, attempts, now + pause_s)
        while len(self._failures) > self._max_keys:
            del self._failures[next(iter(self._failures))]

    def blocked(self, key: str, now: float) -> LoraplexError | None:
        """The error to answer with during the pause; None = try again."""
        failure = self._failures.get(key)
        if failure is None or now >= failure.retry_at_s:
            return None
        return failure.error

    def clear(self, key: str) -> None:
        """Forget the failures of `key`, after a success."""
        self._failures.pop(key, None)
