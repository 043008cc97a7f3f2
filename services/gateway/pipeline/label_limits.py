"""Metrics by tenant and by adapter with a bounded number of labels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from prometheus_client import Counter

from loraplex_services.gateway.clock import now_s

OTHER = "other"
MAX_LABELS = 100
IDLE_S = 3600.0


class LabelledCounters:
    """A counter of requests and one of tokens, by what has names without end.

    The first names get labels of their own, all others share one. A name that was idle for an hour
    loses its label to the next one, so that the labels come to be those with most traffic. (Labels
    that change more often would look like restarts when rates are computed.)
    """

    def __init__(
        self,
        requests: Counter,
        tokens: Counter,
        most: int = MAX_LABELS,
        now: Callable[[], float] = now_s,
    ) -> None:
        """
        Args:
            requests: with the labels (name, outcome).
            tokens: with the labels (name, kind).
        """
        self._requests = requests
        self._tokens = tokens
        self._most = most
        self._now = now
        self._used_s: OrderedDict[str, float] = OrderedDict()
        """When each name that has a label was last counted, longest ago first."""
        self._labels: dict[str, set[tuple[Counter, str]]] = {}

    def count(self, name: str, outcome: str, tokens: dict[str, int]) -> None:
        """Count a request that ended."""
        label = self._label(name)
        self._add(self._requests, label, outcome, 1)
        for kind, number in tokens.items():
            self._add(self._tokens, label, kind, number)

    def _add(self, counter: Counter, label: str, second: str, number: int) -> None:
        counter.labels(label, second).inc(number)
        self._labels.setdefault(label, set()).add((counter, second))

    def _label(self, name: str) -> str:
        if name not in self._used_s and len(self._used_s) >= self._most:
            oldest, used_s = next(iter(self._used_s.items()))
            if self._now() - used_s < IDLE_S:
                return OTHER
            del self._used_s[oldest]
            for counter, second in self._labels.pop(oldest, ()):
                counter.remove(oldest, second)
        self._used_s[name] = self._now()
        self._used_s.move_to_end(name)
        return name
