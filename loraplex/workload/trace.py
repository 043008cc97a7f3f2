"""Seeded traces: arrival times, adapters and lengths of requests.

The synthetic workload is the one of the S-LoRA paper (section 7.2): each adapter has a Gamma
process of its own, with a rate by a power law, and lengths are uniform. As an option, arrivals are
those of S-LoRA's released script: one Gamma process for all, whose arrivals draw their adapters.
Arrivals and lengths are drawn from separate random streams, so that changing the lengths does not
change the arrivals.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import TypeAlias

from loraplex.errors import InvalidRequest

RANK_MIXES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "S1": (8,),
        "S2": (64, 32, 16, 8),
        "S3": (16,),
        "S4": (64, 32, 16),
        "S5": (32,),
        "S6": (64,),
    }
)
"""Ranks of the paper's settings, dealt to the adapters in turn (see `ranks_of`)."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the start of the trace."""
    adapter: int | None
    """Index of the adapter; None = the bare base."""
    num_input: int
    """Number of tokens of the prompt."""
    num_output: int
    """Number of tokens to generate, exactly."""
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Prompt and output lengths, each uniform over a range with both ends."""

    inputs: tuple[int, int] = (8, 512)
    outputs: tuple[int, int] = (8, 512)

    def __post_init__(self) -> None:
        for name, (low, high) in (("inputs", self.inputs), ("outputs", self.outputs)):
            if not 1 <= low <= high:
                raise InvalidRequest.field(
                    name, f"{low}-{high}", "must be LOW-HIGH with 1 <= LOW <= HIGH, in tokens"
                )

    @property
    def max_tokens(self) -> int:
        """Most tokens that one request can have, prompt and output together."""
        return self.inputs[1] + self.outputs[1]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output length."""
        return rng.randint(*self.inputs), rng.randint(*self.outputs)


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Heavy-tailed lengths as in chats: log-normal with the given means, cut at `cap`.

    The means are those of S-LoRA's Chatbot Arena trace; the shape is assumed, as it is not public.
    """

    mean_input: float = 85.0
    mean_output: float = 165.0
    sigma: float = 1.0
    """Standard deviation of the logarithm of the length."""
    cap: int = 1024
    """Largest prompt and largest output; the cut lowers the means a little."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that one request can have, prompt and output together."""
        return 2 * self.cap

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output length."""
        return self._length(rng, self.mean_input), self._length(rng, self.mean_output)

    def _length(self, rng: random.Random, mean: float) -> int:
        location = math.log(mean) - self.sigma**2 / 2
        return min(self.cap, max(1, round(rng.lognormvariate(location, self.sigma))))


Lengths = UniformLengths | LogNormalLengths


class Arrivals(enum.StrEnum):
    """How arrivals are distributed among processes."""

    PER_ADAPTER = "per-adapter"
    """Each adapter has a process of its own, as in the paper. The number of requests is random, and
    with it the rate of a single trace."""
    POOLED = "pooled"
    """All adapters share one process, as in S-LoRA's released script. The number of requests is
    fixed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of a trace."""

    num_adapters: int
    """0 = all requests for the bare base."""
    rate_per_s: float
    """Mean arrivals per second."""
    duration_s: float
    cv: float = 1.0
    """Coefficient of variation of a process's gaps: 1 = Poisson, more = bursts."""
    alpha: float = 1.0
    """Exponent of the power law: 1 = uniform; towards 0 the first adapters get all requests."""
    lengths: Lengths = UniformLengths()
    seed: int = 0
    arrivals: Arrivals = Arrivals.PER_ADAPTER

    def __post_init__(self) -> None:
        if self.num_adapters < 0:
            raise InvalidRequest.field("--adapters", self.num_adapters, "must be 0 or more")
        numbers = {"rate": self.rate_per_s, "duration": self.duration_s}
        for name, value in {**numbers, "cv": self.cv, "alpha": self.alpha}.items():
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest.field(f"--{name}", value, "must be a finite number above 0")

    def adapter_rate(self, index: int) -> float:
        """Mean arrivals a second for an adapter: the power law's part of the rate, which has the
        density alpha * x^(alpha - 1) over x = index / n in [0, 1)."""
        n, alpha = self.num_adapters, self.alpha
        share: float = ((index + 1) / n) ** alpha - (index / n) ** alpha
        return self.rate_per_s * share


Arrival: TypeAlias = tuple[float, int | None]
"""Seconds since the start of the trace; index of the adapter, None = the bare base."""


def generate(workload: Workload) -> list[TracedRequest]:
    """The trace, by arrival. Equal workloads give equal traces.

    Raises:
        InvalidRequest: no request arrives.
    """
    pooled = workload.arrivals is Arrivals.POOLED
    arrivals = _pooled_arrivals(workload) if pooled else _adapter_arrivals(workload)
    if not arrivals:
        raise InvalidRequest.field(
            "--rate",
            workload.rate_per_s,
            f"gives no request in {workload.duration_s:g} s: raise it, or --duration",
        )
    lengths = random.Random(f"{workload.seed}/lengths")
    return [
        TracedRequest(arrival_s, adapter, *workload.lengths.draw(lengths))
        for arrival_s, adapter in arrivals
    ]


def _adapter_arrivals(workload: Workload) -> list[Arrival]:
    """A Gamma renewal process for each adapter, all of them in order.

    The processes run since long before the trace, so that the mean number of arrivals is rate times
    duration whatever the variation: the trace begins within a gap, which is the likelier the longer
    it is. So the time to the first arrival is a uniform part of a gap drawn in proportion to its
    length. Source: Cox, Renewal Theory, section 5.2 (equilibrium renewal process).
    """
    rng = random.Random(f"{workload.seed}/gaps")
    shape = workload.cv**-2
    arrivals: list[Arrival] = []
    adapters: Iterable[int | None] = range(workload.num_adapters) or (None,)
    for adapter in adapters:
        rate_per_s = workload.rate_per_s if adapter is None else workload.adapter_rate(adapter)
        scale_s = 1.0 / (shape * rate_per_s) if rate_per_s else math.inf
        arrival_s = rng.random() * rng.gammavariate(shape + 1.0, scale_s)
        while arrival_s < workload.duration_s:
            arrivals.append((arrival_s, adapter))
            arrival_s += rng.gammavariate(shape, scale_s)
    arrivals.sort(key=itemgetter(0))
    return arrivals


def _pooled_arrivals(workload: Workload) -> list[Arrival]:
    """Exactly rate times duration arrivals, at least one."""
    gaps, adapters = (random.Random(f"{workload.seed}/{name}") for name in ("gaps", "adapters"))
    arrivals: list[Arrival] = []
    arrival_s = 0.0
    for _ in range(max(1, round(workload.rate_per_s * workload.duration_s))):
        arrival_s += gaps.gammavariate(workload.cv**-2, workload.cv**2 / workload.rate_per_s)
        quantile = adapters.random() ** (1.0 / workload.alpha)
        index = min(int(quantile * workload.num_adapters), workload.num_adapters - 1)
        arrivals.append((arrival_s, index if workload.num_adapters else None))
    return arrivals


def ranks_of(mix: Sequence[int], num_adapters: int) -> list[int]:
    """Rank of each adapter: the mix of ranks, dealt in rotation."""
    return [mix[index % len(mix)] for index in range(num_adapters)]
