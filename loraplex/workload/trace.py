"""Seeded traces: when requests arrive, for which adapter, how long they are.

The synthetic workload is the one of the S-LoRA paper (section 7.1): Gamma arrivals, a power law
over adapters, uniform lengths. Arrivals, adapters and lengths are drawn from streams of their own,
so that changing one parameter leaves the others' draws as they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

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
    """Since the start of the trace."""
    adapter: int | None
    """Index of the adapter; None = the bare base."""
    num_input: int
    """Tokens of the prompt."""
    num_output: int
    """Tokens to generate, exactly."""
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
        """The most that one request can have, prompt and output together."""
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
    """Of the logarithm of the length."""
    cap: int = 1024
    """Of prompt and of output, each; what it cuts off lowers the means a little."""

    @property
    def max_tokens(self) -> int:
        """The most that one request can have, prompt and output together."""
        return 2 * self.cap

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output length."""
        return self._length(rng, self.mean_input), self._length(rng, self.mean_output)

    def _length(self, rng: random.Random, mean: float) -> int:
        location = math.log(mean) - self.sigma**2 / 2
        return min(self.cap, max(1, round(rng.lognormvariate(location, self.sigma))))


Lengths = UniformLengths | LogNormalLengths


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of a trace."""

    num_adapters: int
    """0 = all requests for the bare base."""
    rate_per_s: float
    """Mean arrivals a second."""
    duration_s: float
    cv: float = 1.0
    """Coefficient of variation of the gaps: 1 = Poisson, more = bursts."""
    alpha: float = 1.0
    """Exponent of the power law: 1 = uniform; towards 0 the first adapters get all requests."""
    lengths: Lengths = UniformLengths()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_adapters < 0:
            raise InvalidRequest.field("adapters", self.num_adapters, "must be 0 or more")
        for name in ("rate_per_s", "duration_s", "cv", "alpha"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest.field(name, value, "must be a finite number above 0")

    @property
    def num_requests(self) -> int:
        """Requests of the trace: rate times duration, at least one."""
        return max(1, round(self.rate_per_s * self.duration_s))


def generate(workload: Workload) -> list[TracedRequest]:
    """The trace, by arrival. Equal workloads give equal traces."""
    gaps, adapters, lengths = (
        random.Random(f"{workload.seed}/{stream}") for stream in ("gaps", "adapters", "lengths")
    )
    requests = []
    arrival_s = 0.0
    for _ in range(workload.num_requests):
        arrival_s += gaps.gammavariate(workload.cv**-2, workload.cv**2 / workload.rate_per_s)
        requests.append(
            TracedRequest(arrival_s, _adapter(workload, adapters), *workload.lengths.draw(lengths))
        )
    return requests


def _adapter(workload: Workload, rng: random.Random) -> int | None:
    """Index with density alpha * x^(alpha - 1) over x = index / n in [0, 1)."""
    if not workload.num_adapters:
        return None
    place = rng.random() ** (1.0 / workload.alpha)
    return min(int(place * workload.num_adapters), workload.num_adapters - 1)


def ranks_of(mix: Sequence[int], num_adapters: int) -> list[int]:
    """Rank of each adapter: the mix dealt round-robin."""
    return [mix[index % len(mix)] for index in range(num_adapters)]
