"""Accounts for the memory of prompts whose requests wait or run.

A token of a prompt takes 36 bytes as long as its request lasts. Requests with long prompts that
wait, for a worker or for the end of a pause, would otherwise fill the memory of a gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.errors import ResourceExhausted
from loraplex_services.common.limits import MAX_HELD_TOKENS, MAX_HELD_TOKENS_PER_TENANT
from loraplex_services.common.nonzero_counter import NonzeroCounter


class HeldPrompts:
    """Tokens of the prompts that one gateway holds, by tenant."""

    def __init__(self) -> None:
        self._by_tenant: NonzeroCounter[str] = NonzeroCounter()

    @contextmanager
    def counted(self, tenant: str, num_tokens: int) -> Iterator[None]:
        """Count a prompt in the meantime. Raises ResourceExhausted if the prompts of the tenant
        hold too much."""
        held = self._by_tenant[tenant] + num_tokens
        total = self._by_tenant.total() + num_tokens
        is_over = total > MAX_HELD_TOKENS and held > total / max(1, len(self._by_tenant))
        if held > num_tokens and (is_over or held > MAX_HELD_TOKENS_PER_TENANT):
            raise ResourceExhausted(
                f"the prompts of tenant {tenant!r} that wait or run have {held} tokens together; "
                "send fewer at a time",
                reason="PROMPTS_TOO_LARGE",
                retry_after_s=1.0,
            )
        self._by_tenant[tenant] += num_tokens
        try:
            yield
        finally:
            self._by_tenant.remove(tenant, num_tokens)
