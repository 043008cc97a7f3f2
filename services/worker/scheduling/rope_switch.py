"""Requests that need another rotary embedding, from token 0 on, because their sequence is long.

Such a request is long when it has more expected tokens than `switch_len`. Nothing that was computed
before it grew long can be used after: it starts again, as if it had been preempted.
"""

from __future__ import annotations

from collections.abc import Iterable

from loraplex_services.worker.types.request import Request


def is_long(request: Request, base_switch_len: int | None) -> bool:
    """Whether the KV of a request must be that of a long sequence."""
    switch_len = base_switch_len if request.rope is None else request.rope.switch_len
    return switch_len is not None and request.num_expected > switch_len


def measure(request: Request, base_switch_len: int | None) -> None:
    """Note whether a request is long, before its KV is looked up or computed. Mutates it."""
    if is_long(request, base_switch_len) != request.is_long:
        request.is_long = not request.is_long
        request.prefix_hashes.clear()


def outgrown(requests: Iterable[Request], base_switch_len: int | None) -> list[Request]:
    """Requests that were short when their KV was computed, and that have become long."""
    if base_switch_len is None:
        requests = [request for request in requests if request.rope is not None]
    return [r for r in requests if is_long(r, base_switch_len) and not r.is_long]
