"""Immutable views of workers, as the router sees them. No grpc."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as it was last reported, and what this gateway has sent to it since."""

    worker_id: str
    address: str
    base_id: str
    epoch: int = 0
    connected: bool = False
    """True while its session stream is open."""
    ready: bool = False
    draining: bool = False
    stale: bool = False
    """Whether the worker has not reported for several intervals."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    adapters: Mapping[str, AdapterResidency] = field(default_factory=dict)
    numerics: str = ""
    dtype: str = ""
    kernels: str = ""
    quantization: str = ""
    """Scheme of quantisation at load; "" = the base is served as it is published."""
    in_flight: int = 0
    """Requests of this gateway that have not ended."""
    in_flight_tokens: int = 0
    """Prompt tokens of those that have no first token yet."""
    requested: frozenset[str] = frozenset()
    """Adapters of those requests: requested, whether or not the worker reports them yet."""

    @property
    def takes_requests(self) -> bool:
        """True if new requests may be sent to the worker."""
        return self.connected and self.ready and not self.draining

    @property
    def num_requests(self) -> int:
        """Requests at the worker: its count, or our own if that is larger and thus newer."""
        reported = self.load.running_requests + self.load.waiting_requests
        return max(reported, self.in_flight)

    @property
    def batch_capacity(self) -> int:
        """Requests of this gateway that it can run concurrently.

        That is the size of its batch without the requests of other gateways; while it is full, the
        requests that it has.
        """
        if self.load.is_full:
            return self.in_flight
        others = max(self.num_requests - self.in_flight, 0)
        return max(self.load.max_running_requests - others, 0)

    def tier_of(self, digest: str) -> Tier:
        """The tier of an adapter."""
        found = self.adapters.get(digest)
        tier = found.tier if found is not None else Tier.NONE
        return max(tier, Tier.LOADING) if digest in self.requested else tier

    @property
    def num_loading(self) -> int:
        """Adapters that are being loaded onto the device."""
        reported = sum(each.tier is Tier.LOADING for each in self.adapters.values())
        unreported = (self.adapters.get(digest) for digest in self.requested)
        return reported + sum(each is None or each.tier < Tier.LOADING for each in unreported)


def no_worker_reason(views: Iterable[WorkerView]) -> str:
    """Why no request would be served now, although the gateway itself is ready; "" if one is."""
    return "" if any(view.takes_requests for view in views) else "no worker is ready"
