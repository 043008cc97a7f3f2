"""The state of a registry for /debug/state: names, counts and times, without user text."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from itertools import islice
from typing import Any

from loraplex_services.common.grpc.open_calls import OpenCall
from loraplex_services.common.grpc.server import RunningServer
from loraplex_services.registry.assembly import Registry

MAX_LISTED = 100
"""Most calls that are listed; their numbers are always given."""


@dataclasses.dataclass(slots=True)
class RegistryState:
    """The parts of a registry that are looked at, and why it is not ready."""

    registry: Registry
    running: RunningServer
    not_ready_reason: str = "the object store and the index have not been checked yet"

    def read(self) -> dict[str, Any]:
        """The state now, as plain data for JSON."""
        calls = self.running.open_calls
        now_s = time.monotonic()
        return {
            "is_ready": self.running.ready,
            "not_ready_reason": self.not_ready_reason,
            "objects": self.registry.store.url,
            "index": self.registry.indexer.state(),
            "events": self.registry.catalog.feed.state(),
            "num_calls": dict(Counter(call.method for call in calls)),
            "oldest_calls": [_call(call, now_s) for call in islice(calls, MAX_LISTED)],
        }


def _call(call: OpenCall, now_s: float) -> dict[str, Any]:
    return {
        "method": call.method,
        "tenant": call.tenant,
        "age_s": round(now_s - call.begin_s, 3),
    }
