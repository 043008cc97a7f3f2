"""Limits on steps."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEP_S = 0.2
"""Target time of a step in which requests decode; prompts are cut to meet it. With 0.1 s, gaps
between the tokens of streams shrink by a sixth and throughput falls by an eighth
(benchmarks/serving/long_prompts.py)."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on one step."""

    max_step_tokens: int
    """Token budget: positions computed by one step."""
    max_running: int
    """Requests in the running batch."""
    max_loras: int | None = None
    """Distinct adapters in one step; None = no limit but memory."""
    max_overtaking_s: float = 5.0
    """A request that has waited this long, in seconds, is no longer overtaken by newer ones."""
    cluster_size: int = 0
    """While this many adapters run, a tenant's requests for these go first; 0 = never."""
    max_cluster_age_s: float = 30.0
    """Time, in seconds, after which a request is no longer passed over for those. If this were
    shorter than the usual waiting time, clustering would become first come, first served."""
    min_cluster_queue: float = 0.5
    """Waiting requests per running request. In a shorter queue, no request is passed over, because
    clustering gains little there and makes requests late. `docs/experiments.md` has the
    measurements of both."""
    rope_switch_len: int | None = None
    """A request that grows beyond this number of tokens is computed again; see `ModelInfo`."""
    max_step_s: float = 0.0
    """Target duration in seconds of steps in which requests decode: prompt chunks shrink to meet
    it. 0 = none."""
    drafts: bool = False
    """Whether a step may verify drafts; see `drafts`."""
    proposal_cost: float = 0.0
    """This and the next two: see `ModelInfo`."""
    expert_share: float = 0.0
    active_experts: float = 1.0

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.max_step_tokens, f"{self}"
