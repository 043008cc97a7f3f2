"""Reports what tenants used to the registry, and repeats failed reports."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from loraplex.api.registry import UsageEntry
from loraplex.api.registry_wire import usage_entry_to_proto
from loraplex.errors import LoraplexError
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.registry.link import RegistryLink

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0


class DailyUsageKey(NamedTuple):
    """A day, tenant and model whose usage is counted separately."""

    day: str
    """YYYY-MM-DD, in UTC."""
    tenant: str
    model: str


@dataclass(slots=True)
class UsageCounts:
    """Sums over requests."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    duration_s: float = 0.0


UsageByKey = Mapping[DailyUsageKey, UsageCounts]


class UsageSource(Protocol):
    """The part of the gateway that counts usage."""

    def take(self) -> UsageByKey:
        """The counts since the last call."""

    def take_ephemeral(self) -> Collection[str]:
        """Ephemeral adapters that were used since the last call, as tenant/name."""


class UsageReports:
    """Reports of one gateway."""

    def __init__(self, registry: RegistryLink, usage: UsageSource) -> None:
        self._registry = registry
        self._usage = usage
        self._unsent: registry_pb2.RecordUsageRequest | None = None

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.send()

    async def send(self) -> None:
        """Send what was counted, or the last report again if it may not have arrived."""
        if self._unsent is None:
            entries = [_entry(key, counts) for key, counts in self._usage.take().items()]
            if not entries:
                return
            report_id = secrets.token_hex(16)
            self._unsent = registry_pb2.RecordUsageRequest(
                report_id=report_id,
                entries=entries,
                ephemeral_adapters=self._usage.take_ephemeral(),
            )
        try:
            await self._registry.record_usage(self._unsent)
        except LoraplexError as error:
            logger.warning("usage not reported", extra={"problem": error.message})
        else:
            self._unsent = None


def _entry(key: DailyUsageKey, counts: UsageCounts) -> registry_pb2.UsageEntry:
    return usage_entry_to_proto(UsageEntry(*key, **dataclasses.asdict(counts)))
