"""Limits the memory of answers that are collected before they are sent, until clients read them.

A token with twenty logprobs takes thousands of bytes once it is formatted, and its experts take
hundreds. A head may have thousands of labels. Requests with many choices and long answers, or many
inputs, would otherwise fill the memory of a gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loraplex.errors import ResourceExhausted
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import (
    MAX_COLLECTED_BYTES,
    MAX_COLLECTED_BYTES_PER_TENANT,
    SERVICE_KEY_IDS,
)
from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.gateway.request import TextDelta

_DELTA_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 300, 100, 120
"""Approximate sizes of a formatted text delta, of each of its tokens and of each logprob."""
_VALUE_BYTES = 60
"""Approximate size of a number of a vector, as it came, as it is returned, and in JSON."""

Note = Callable[[TextDelta], None]
"""Counts a text delta of an answer. Raises ResourceExhausted if the answers of its tenant hold too
much."""


class CollectedBytes:
    """Bytes that the unfinished and unread answers of one gateway hold, by tenant."""

    def __init__(self) -> None:
        self._by_tenant: NonzeroCounter[str] = NonzeroCounter()

    @contextmanager
    def counted(self, caller: Caller) -> Iterator[Note]:
        """A function that counts each text delta of one answer until the answer ends. For callers
        without a tenant's key, it counts only experts and vectors, and those of each answer for
        itself.
        """
        if caller.key_id in SERVICE_KEY_IDS:
            yield _counting_one()
            return
        mine = 0

        def note(text_delta: TextDelta) -> None:
            nonlocal mine
            num_bytes = bytes_of(text_delta)
            mine += num_bytes
            self._add(caller.tenant, num_bytes)

        try:
            yield note
        finally:
            self._by_tenant.remove(caller.tenant, mine)

    @contextmanager
    def unread(self, caller: Caller, num_bytes: int) -> Iterator[None]:
        """Count a formatted answer until its client has read it. Those of callers without a
        tenant's key are not counted. Raises: ResourceExhausted.
        """
        if caller.key_id in SERVICE_KEY_IDS:
            yield
            return
        try:
            self._add(caller.tenant, num_bytes)
            yield
        finally:
            self._by_tenant.remove(caller.tenant, num_bytes)

    def _add(self, tenant: str, num_bytes: int) -> None:
        self._by_tenant[tenant] += num_bytes
        held, total = self._by_tenant[tenant], self._by_tenant.total()
        is_over = total > MAX_COLLECTED_BYTES and held > total / len(self._by_tenant)
        if is_over or held > MAX_COLLECTED_BYTES_PER_TENANT:
            raise _too_large()


def _counting_one() -> Note:
    """A function that raises ResourceExhausted if one answer has too many experts or numbers of
    vectors. Nothing else bounds these, and formatting makes several copies of them."""
    held = 0

    def note(text_delta: TextDelta) -> None:
        nonlocal held
        held += _expert_bytes(text_delta) + _VALUE_BYTES * len(text_delta.pooled)
        if held > MAX_COLLECTED_BYTES_PER_TENANT:
            raise _too_large()

    return note


def _too_large() -> ResourceExhausted:
    return ResourceExhausted(
        "the answers under way are too large to be sent as a whole; read or stream them (experts "
        "over gRPC), or ask for fewer choices, logprobs, experts or inputs at a time",
        reason="ANSWERS_TOO_LARGE",
        retry_after_s=1.0,
    )


def _expert_bytes(text_delta: TextDelta) -> int:
    return 0 if text_delta.routed_experts is None else len(text_delta.routed_experts.experts)


def bytes_of(text_delta: TextDelta) -> int:
    """Approximate memory of a text delta."""
    num_logprobs = sum(1 + len(entry.top) for entry in text_delta.logprobs)
    if (prompt := text_delta.prompt_logprobs) is not None:
        num_logprobs += len(prompt) * (1 + prompt.num_top)
    num_bytes = _TOKEN_BYTES * len(text_delta.token_ids) + _LOGPROB_BYTES * num_logprobs
    num_bytes += _VALUE_BYTES * len(text_delta.pooled)
    return _DELTA_BYTES + num_bytes + _expert_bytes(text_delta)
