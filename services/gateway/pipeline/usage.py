"""Counts what tenants use: one log line for each request, and counts for the registry."""

from __future__ import annotations

import datetime
import logging
import time

from loraplex.errors import LoraplexError
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.metrics import (
    ADAPTER_REQUESTS,
    ADAPTER_TOKENS,
    TENANT_REQUESTS,
    TENANT_TOKENS,
)
from loraplex_services.gateway.pipeline.history import CANCELLED, OK, LoadHistory
from loraplex_services.gateway.pipeline.label_limits import OTHER, LabelledCounters
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.registry.usage_reports import DailyUsageKey, UsageByKey, UsageCounts
from loraplex_services.gateway.request import GenerateCall, RunningAdapter, Target

logger = logging.getLogger(__name__)

MAX_KEYS = 5_000
"""Days, tenants and models that are counted apart between two reports; models beyond them are
counted as `OTHER`."""
COMBINED = "+"
"""Joins the names of adapters that ran together; no name contains it."""
MAX_NAMES = 5_000
MAX_COMBINATIONS = 100
"""Adapters, and combinations of adapters, that are counted apart for one tenant and day; further
ones are counted as `OTHER`. Twenty adapters have 125,000 combinations of eight, and the registry
keeps the counts of each for months."""
EPHEMERAL = "ephemeral"
"""Name under which all ephemeral adapters are counted: there may be one for each request."""
_BY_TENANT = LabelledCounters(TENANT_REQUESTS, TENANT_TOKENS)
_BY_ADAPTER = LabelledCounters(ADAPTER_REQUESTS, ADAPTER_TOKENS)


class UsageCounter:
    """Counts since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[DailyUsageKey, UsageCounts] = {}
        self._ephemeral: set[str] = set()
        """Ephemeral adapters that were used, as tenant/name, at most `MAX_KEYS`."""
        self._day = ""
        self._known: dict[tuple[str, bool], set[str]] = {}
        """Models that were counted on `_day`, by tenant and whether they are combinations."""
        self.history = LoadHistory()

    def add(self, prepared: PreparedRequest, outcome: str) -> None:
        """Count a request that ended, and log it. The log contains nothing of its text."""
        usage, duration_s = prepared.usage, now_s() - prepared.arrival_s
        tenant, model = prepared.call.tenant, model_of(prepared.target)
        logger.info(
            "request",
            extra={
                "request_id": prepared.call.request_id,
                "tenant": tenant,
                "model": ",".join(each.label for each in prepared.target.adapters) or model,
                "outcome": outcome,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "generated_tokens": usage.completion_tokens,
                "duration_s": round(duration_s, 4),
            },
        )
        self.history.ended(
            outcome,
            model,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.completion_tokens,
            duration_s=duration_s,
        )
        is_failure = outcome not in (OK, CANCELLED)
        shown = "failed" if is_failure else outcome
        tokens = {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "generated": usage.completion_tokens,
        }
        _BY_TENANT.count(tenant, shown, tokens)
        if prepared.target.adapters:
            _BY_ADAPTER.count(model, shown, tokens)
        self._note_ephemeral(tenant, prepared.target)
        counts = self._of(_today(), tenant, _counted_as(prepared.target))
        counts.requests += 1
        counts.errors += is_failure
        counts.prompt_tokens += usage.prompt_tokens
        counts.cached_tokens += usage.cached_tokens
        counts.generated_tokens += usage.completion_tokens
        counts.duration_s += duration_s

    def refuse(self, call: GenerateCall, error: LoraplexError) -> None:
        """Log a request that was refused. What it names as its model may be anything, and is left
        out."""
        outcome = outcome_of(error)
        fields = {"request_id": call.request_id, "tenant": call.tenant, "outcome": outcome}
        logger.info("request", extra=fields)
        self.history.ended(outcome)

    def take(self) -> UsageByKey:
        """The counts, which begin again."""
        taken, self._counts = self._counts, {}
        return taken

    def take_ephemeral(self) -> set[str]:
        """Ephemeral adapters that were used since the last call, as tenant/name."""
        taken, self._ephemeral = self._ephemeral, set()
        return taken

    def _note_ephemeral(self, tenant: str, target: Target) -> None:
        """Requests of other tenants, with whom an adapter is shared, do not keep it."""
        names = {_name_of(adapter) for adapter in target.adapters if adapter.is_ephemeral}
        own = {name for name in names if name.startswith(f"{tenant}/")}
        if len(self._ephemeral) + len(own) <= MAX_KEYS:
            self._ephemeral |= own

    def _of(self, day: str, tenant: str, model: str) -> UsageCounts:
        key = DailyUsageKey(day, tenant, self._limited(day, tenant, model))
        if key not in self._counts and len(self._counts) >= MAX_KEYS:
            key = DailyUsageKey(day, tenant, OTHER)
        return self._counts.setdefault(key, UsageCounts())

    def _limited(self, day: str, tenant: str, model: str) -> str:
        """The model, or `OTHER` if the tenant has had too many that day."""
        if day != self._day:
            self._day = day
            self._known.clear()
        is_combined = COMBINED in model
        known = self._known.setdefault((tenant, is_combined), set())
        if model not in known and len(known) >= (MAX_COMBINATIONS if is_combined else MAX_NAMES):
            return OTHER
        known.add(model)
        return model


def _counted_as(target: Target) -> str:
    is_ephemeral = any(adapter.is_ephemeral for adapter in target.adapters)
    return EPHEMERAL if is_ephemeral else model_of(target)


def _name_of(adapter: RunningAdapter) -> str:
    """tenant/name, without the version."""
    return adapter.label.rpartition(":")[0]


def model_of(target: Target) -> str:
    """Names of the adapters without their versions, or the base."""
    names = sorted(map(_name_of, target.adapters))
    return COMBINED.join(names) or target.base_id


def outcome_of(error: BaseException) -> str:
    """How a request ended that raised."""
    if isinstance(error, LoraplexError):
        return error.reason.lower()
    return "internal" if isinstance(error, Exception) else CANCELLED


def _today() -> str:
    return datetime.datetime.fromtimestamp(time.time(), datetime.UTC).date().isoformat()
