"""Accounts for the memory of answers that are collected before they are sent.

A token with twenty logprobs takes thousands of bytes until its answer is complete. Requests with
many choices and long answers would otherwise fill the memory of a gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loraplex.errors import ResourceExhausted
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import (
    MAX_COLLECTED_BYTES,
    MAX_COLLECTED_BYTES_PER_TENANT,
    SERVICE_KEY_IDS,
)
from loraplex_services.gateway.request import TextDelta

_DELTA_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 300, 100, 120
"""Approximate sizes of a text delta, of each of its tokens and of each logprob."""


class CollectedBytes:
    """Bytes that the unfinished answers of one gateway hold, by tenant. No empty entries."""

    def __init__(self) -> None:
        self._by_tenant: Counter[str] = Counter()

    @contextmanager
    def counted(self, caller: Caller) -> Iterator[Callable[[TextDelta], None]]:
        """A function that counts each text delta of one answer until the answer ends. Callers
        without a tenant's key are not limited.

        The function raises ResourceExhausted if the answers of the tenant hold too much.
        """
        if caller.key_id in SERVICE_KEY_IDS:
            yield lambda _: None
            return
        tenant, mine = caller.tenant, 0

        def note(text_delta: TextDelta) -> None:
            nonlocal mine
            num_bytes = bytes_of(text_delta)
            mine += num_bytes
            self._by_tenant[tenant] += num_bytes
            held, total = self._by_tenant[tenant], self._by_tenant.total()
            is_over = total > MAX_COLLECTED_BYTES and held > total / len(self._by_tenant)
            if is_over or held > MAX_COLLECTED_BYTES_PER_TENANT:
                raise ResourceExhausted(
                    "the answers under way are too large to be sent as a whole; stream them, or "
                    "ask for fewer choices or logprobs at a time",
                    reason="ANSWERS_TOO_LARGE",
                    retry_after_s=1.0,
                )

        try:
            yield note
        finally:
            self._by_tenant[tenant] -= mine
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]


def bytes_of(text_delta: TextDelta) -> int:
    """Approximate memory of a text delta."""
    num_logprobs = sum(1 + len(entry.top) for entry in text_delta.logprobs)
    if (prompt := text_delta.prompt_logprobs) is not None:
        num_logprobs += len(prompt) * (1 + prompt.num_top)
    return _DELTA_BYTES + _TOKEN_BYTES * len(text_delta.token_ids) + _LOGPROB_BYTES * num_logprobs
