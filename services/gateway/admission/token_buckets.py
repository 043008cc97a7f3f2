"""Token buckets that several gateways share through leases. Pure, under the caller's clock.

A `Bucket` is the one account of a tenant's rate: it fills at `rate` per second up to one second's
worth. A gateway never asks it for every request: it takes a `Lease` of at most one second's worth
and spends that. In any time T all gateways together spend at most

    rate * T + one second's worth + gateways * lease

whatever they do, because what they spend was taken from the bucket before. A request that costs
more than a full bucket waits for a full one and leaves it in debt, so that the mean rate holds.
"""

from __future__ import annotations

from dataclasses import dataclass

LEASE_S = 1.0
"""A lease holds at most this many seconds of the rate."""


def capacity_of(rate: float) -> float:
    """The capacity of a bucket: one second's worth, and at least one unit."""
    return max(rate * LEASE_S, 1.0)


@dataclass(frozen=True, slots=True)
class Grant:
    """An answer of a bucket: units granted, or none and when to ask again."""

    amount: float
    wait_s: float = 0.0


@dataclass(slots=True)
class Bucket:
    """The account of one rate. `level` may be negative: debt of an oversize request."""

    level: float
    filled_s: float

    def ask(self, rate: float, need: float, extra: float, returned: float, now_s: float) -> Grant:
        """Give `need` units and up to `extra` more, or nothing. Mutates: self.

        Args:
            returned: units of an earlier grant that will not be spent.
        """
        capacity = capacity_of(rate)
        elapsed_s = max(now_s - self.filled_s, 0.0)
        self.level = min(self.level + elapsed_s * rate + returned, capacity)
        self.filled_s = max(now_s, self.filled_s)
        missing = min(need, capacity) - self.level
        if missing > 1e-9:
            return Grant(0.0, missing / rate)
        more = min(extra, max(self.level - need, 0.0))
        self.level -= need + more
        return Grant(need + more)


@dataclass(slots=True)
class Lease:
    """The part of a bucket that one gateway holds and has not spent."""

    held: float = 0.0
    recent: float = 0.0
    """Units spent recently, halved every `LEASE_S`: the expected need of the next second."""
    faded_s: float = 0.0

    def take(self, amount: float, rate: float, now_s: float) -> float:
        """Take up to `amount` out of what is held; returns what is missing. Mutates: self."""
        self.recent *= 0.5 ** (max(now_s - self.faded_s, 0.0) / LEASE_S)
        self.faded_s = max(now_s, self.faded_s)
        held = min(self.held, capacity_of(rate))
        taken = min(held, amount)
        self.held = held - taken
        return amount - taken

    def wish(self, need: float, rate: float) -> float:
        """The units to request beyond `need`: the expected use of a second, within a lease."""
        return min(self.recent, max(capacity_of(rate) - need, 0.0))

    def put(self, amount: float, rate: float) -> float:
        """Hold units for later; returns what is too much to keep. Mutates: self."""
        held = self.held + amount
        self.held = min(held, capacity_of(rate))
        return held - self.held

    def count(self, amount: float) -> None:
        """Units were spent. Mutates: self."""
        self.recent += amount
