"""Results of a trace: throughput, latency, and the SLO figures of the S-LoRA paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEFAULT_SLO_S = 6.0


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How one request of a trace ended. Times are in seconds since the start of the trace."""

    arrival_s: float
    first_token_s: float | None
    """None = it never got one."""
    end_s: float
    num_output: int
    """Number of tokens received."""
    finished: bool
    """False if it was aborted, shed or failed, whatever was received before."""
    reason: str = ""
    """Why it did not finish."""
    engine_s: float | None = None
    """The part of the first token's latency that the worker reports: queue, load and prefill."""

    @property
    def first_token_latency_s(self) -> float:
        """Time from arrival to the first token; infinite if there was none or it was aborted."""
        if self.first_token_s is None or not self.finished:
            return math.inf
        return self.first_token_s - self.arrival_s

    @property
    def outside_s(self) -> float | None:
        """The part of the first token's latency outside the engine; None = not known."""
        if self.engine_s is None or self.first_token_s is None:
            return None
        return max(0.0, self.first_token_s - self.arrival_s - self.engine_s)

    @property
    def token_latency_s(self) -> float | None:
        """Mean gap between output tokens; None with fewer than two."""
        if self.first_token_s is None or self.num_output < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one figure over requests, in seconds; all 0 if there was nothing to
    measure."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers."""

    num_requests: int
    num_finished: int
    makespan_s: float
    """Time from the start of the trace to the end of its last request, in seconds."""
    requests_per_s: float
    """Finished requests per second of the makespan."""
    output_tokens_per_s: float
    first_token: Percentiles
    """Latency of the first token of finished requests."""
    per_token: Percentiles
    """Mean gap between a finished request's output tokens."""
    outside: Percentiles
    """The part of the first token's latency outside the engine: gateway, servers, network."""
    latency: Percentiles
    """Time from arrival to the last token of finished requests."""
    slo_s: float
    attainment: float
    """Share of all requests whose first token came before `slo_s`; aborted ones count as 0."""
    satisfaction: float
    """Mean over all requests of 1 - (first token latency / slo_s)^2; late and aborted ones 0."""
    failures: dict[str, int]
    """Requests that did not finish, by reason."""


def summarize(outcomes: Sequence[RequestOutcome], slo_s: float = DEFAULT_SLO_S) -> Summary:
    """Numbers of a run; `outcomes` holds every request of the trace."""
    finished = [outcome for outcome in outcomes if outcome.finished]
    latencies_s = [outcome.first_token_latency_s for outcome in outcomes]
    makespan_s = max((outcome.end_s for outcome in outcomes), default=0.0)
    num_tokens = sum(outcome.num_output for outcome in finished)
    rewards = [max(0.0, 1.0 - (latency / slo_s) ** 2) for latency in latencies_s]
    gaps_s = (outcome.token_latency_s for outcome in finished)
    return Summary(
        num_requests=len(outcomes),
        num_finished=len(finished),
        makespan_s=makespan_s,
        requests_per_s=_ratio(len(finished), makespan_s),
        output_tokens_per_s=_ratio(num_tokens, makespan_s),
        first_token=percentiles(latency for latency in latencies_s if latency < math.inf),
        per_token=percentiles(gap for gap in gaps_s if gap is not None),
        outside=percentiles(o.outside_s for o in finished if o.outside_s is not None),
        latency=percentiles(outcome.end_s - outcome.arrival_s for outcome in finished),
        slo_s=slo_s,
        attainment=_ratio(sum(latency < slo_s for latency in latencies_s), len(outcomes)),
        satisfaction=_ratio(sum(rewards), len(outcomes)),
        failures=dict(Counter(outcome.reason for outcome in outcomes if outcome.reason)),
    )


def percentiles(values_s: Iterable[float]) -> Percentiles:
    """Mean and nearest-rank percentiles."""
    ordered = sorted(values_s)
    if not ordered:
        return Percentiles(0.0, 0.0, 0.0, 0.0)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
