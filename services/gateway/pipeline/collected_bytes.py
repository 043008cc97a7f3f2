"""Limits the memory of answers that are collected before they are sent, until clients read them.

A token with twenty logprobs takes thousands of bytes once it is formatted, and its experts take
hundreds. A head may have thousands of labels. Requests with many choices and long answers, or many
inputs, would otherwise fill the memory of a gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loraplex.errors import InvalidRequest, ResourceExhausted
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
_FEWER = "(experts over gRPC), or ask for fewer choices, logprobs, experts or inputs at a time"

Note = Callable[[TextDelta], None]
"""Counts a text delta of an answer. Raises InvalidRequest if the answer is too large, and
ResourceExhausted if the answers of its tenant together hold too much."""


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
            self._by_tenant[caller.tenant] += num_bytes
            _check_size(mine)
            self._check(caller.tenant)

        try:
            yield note
        finally:
            self._by_tenant.remove(caller.tenant, mine)

    @contextmanager
    def unread(self, caller: Caller, num_bytes: int) -> Iterator[None]:
        """Count a formatted answer until its client has read it. Those of callers without a
        tenant's key are not counted.

        Raises:
            InvalidRequest: it is too large, whatever the other answers hold.
            ResourceExhausted: they hold too much now.
        """
        if caller.key_id in SERVICE_KEY_IDS:
            yield
            return
        _check_size(num_bytes)
        self._by_tenant[caller.tenant] += num_bytes
        try:
            self._check(caller.tenant)
            yield
        finally:
            self._by_tenant.remove(caller.tenant, num_bytes)

    def _check(self, tenant: str) -> None:
        held, total = self._by_tenant[tenant], self._by_tenant.total()
        is_over = total > MAX_COLLECTED_BYTES and held > total / len(self._by_tenant)
        if is_over or held > MAX_COLLECTED_BYTES_PER_TENANT:
            raise ResourceExhausted(
                f"the answers under way are too large together; read or stream them {_FEWER}",
                reason="ANSWERS_TOO_LARGE",
                retry_after_s=1.0,
            )


def _counting_one() -> Note:
    """A function that checks only the experts and the numbers of vectors in one answer. Nothing
    else bounds these, and formatting makes several copies of them."""
    held = 0

    def note(text_delta: TextDelta) -> None:
        nonlocal held
        held += _expert_bytes(text_delta) + _VALUE_BYTES * len(text_delta.pooled)
        _check_size(held)

    return note


def _check_size(num_bytes: int) -> None:
    """Raises InvalidRequest for an answer that would exceed its tenant's limit by itself."""
    if num_bytes > MAX_COLLECTED_BYTES_PER_TENANT:
        why = f"the answer is too large to be sent as a whole; stream it {_FEWER}"
        raise InvalidRequest(why, reason="ANSWER_TOO_LARGE")


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
