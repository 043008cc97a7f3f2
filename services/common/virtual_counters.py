"""Virtual token counters: order tenants by the service that they have received. Pure.

Gateways order their waiting requests by these counters, and workers the requests that they were
sent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

INPUT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
MAX_ABSENT = 1000
"""Number of names without a live request whose counters are kept."""
EXPECTED_BACK_S = 10.0
"""A tenant that had a request within this many seconds is assumed to return."""


def service(num_input: int, num_output: int, weight: float) -> float:
    """The cost of tokens for a tenant of this weight."""
    return (num_input * INPUT_TOKEN_COST + num_output * OUTPUT_TOKEN_COST) / weight


@dataclass(slots=True, eq=False)
class Account:
    """The counter of one name."""

    served: float
    """Weighted service that the name has received."""
    num_live: int = 0
    """Live requests."""
    number: int = 0
    """Grows with the time since which it has had live requests."""


@dataclass(slots=True)
class VirtualCounters:
    """Weighted service received, by name; only differences mean something.

    Source: Sheng et al., Fairness in Serving Large Language Models (VTC), algorithm 2.
    """

    accounts: dict[Hashable, Account] = field(default_factory=dict)
    present: dict[Hashable, Account] = field(default_factory=dict)
    """Accounts with live requests."""
    last_served: Account = field(default_factory=lambda: Account(0.0))
    left_s: dict[Hashable, float] = field(default_factory=dict)
    """When absent names left, the latest last; forgotten after `EXPECTED_BACK_S`."""
    num_returned: int = 0
    """Number of times that a name without live requests got a request."""

    def arrive(self, name: Hashable) -> Account:
        """A request comes. A name that had none is lifted to the least-served present one, or to
        the one that was served last when the last account left.

        Idle time earns no credit.
        """
        account = self.present.get(name)
        if account is None:
            served = self.served_of(name)
            account = self.present[name] = self.accounts.setdefault(name, Account(served))
            account.served = served
            self.num_returned += 1
            account.number = self.num_returned
            self.left_s.pop(name, None)
        account.num_live += 1
        return account

    def served_of(self, name: Hashable) -> float:
        """Service of a present name, or what one that is absent would be lifted to now."""
        if name in self.present:
            return self.present[name].served
        present = (other.served for other in self.present.values())
        floor = min(present, default=self.last_served.served)
        return max(self.accounts[name].served, floor) if name in self.accounts else floor

    def leave(self, name: Hashable, now: float = 0.0) -> None:
        """A request has ended."""
        self.present[name].num_live -= 1
        if not self.present[name].num_live:
            del self.present[name]
            self.left_s[name] = now
            if len(self.left_s) > MAX_ABSENT:
                del self.left_s[next(iter(self.left_s))]
            if len(self.accounts) > len(self.present) + MAX_ABSENT:
                self._forget()

    def charge(self, account: Account, cost: float) -> None:
        """Count service received."""
        account.served += cost
        self.last_served = account

    def is_least_served(self, name: Hashable, now: float) -> bool:
        """Whether no account that is present, or expected back, was served less than `name`."""
        self._expect(now)
        served = self.accounts[name].served
        expected = (self.accounts[other] for other in self.left_s if other in self.accounts)
        return not any(other.served < served for other in (*self.present.values(), *expected))

    def num_expected(self, now: float) -> int:
        """Number of names that are present or expected back."""
        self._expect(now)
        return len(self.present) + len(self.left_s)

    def _expect(self, now: float) -> None:
        """Drop accounts that left long ago."""
        while self.left_s and now - next(iter(self.left_s.values())) > EXPECTED_BACK_S:
            del self.left_s[next(iter(self.left_s))]

    def _forget(self) -> None:
        """Drop absent accounts that an arrival would lift anyway, or all of them if none is
        present."""
        floor = min((other.served for other in self.present.values()), default=math.inf)
        self.accounts = {
            name: account
            for name, account in self.accounts.items()
            if name in self.present or account.served > floor
        }
