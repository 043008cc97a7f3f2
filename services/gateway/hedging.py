"""When a second placement is tried beside one that has given no first token. Pure.

A placement that takes much longer than was estimated, and than placements lately took over their
estimates, probably sits on a worker in trouble. Trying another costs a second prompt computation,
so hedges come out of a budget: a small share of the placements begun.

Source of the budget and of the quantile as a trigger: Dean and Barroso, The Tail at Scale.
"""

from __future__ import annotations

BUDGET_SHARE = 0.05
"""Hedges for each placement begun, at most."""
MOST_SAVED = 10.0
"""Hedges that a quiet time may save up."""
LEAST_DELAY_S = 0.25
_QUANTILE = 0.95
_STEP = 0.05
"""How far one observation moves the quantile, relative to it."""
_FIRST_RATIO, _LEAST_RATIO, _MOST_RATIO = 4.0, 2.0, 64.0


class Hedging:
    """The budget of one gateway, and what it has learnt of first tokens."""

    def __init__(self) -> None:
        self._saved = 1.0
        self._ratio = _FIRST_RATIO
        """Quantile of measured over estimated time to the first token."""

    def begin(self) -> None:
        """A placement was begun."""
        self._saved = min(self._saved + BUDGET_SHARE, MOST_SAVED)

    def observe(self, first_s: float, estimated_s: float) -> None:
        """A placement gave its first token after so long."""
        above = first_s > self._ratio * estimated_s
        # At rest where the share of _QUANTILE lies below: ups and downs cancel there.
        change = _QUANTILE if above else _QUANTILE - 1.0
        ratio = self._ratio * (1.0 + _STEP * change)
        self._ratio = min(max(ratio, _LEAST_RATIO), _MOST_RATIO)

    def delay_s(self, estimated_s: float) -> float:
        """How long to wait for a first token before another placement is tried."""
        return max(self._ratio * estimated_s, LEAST_DELAY_S)

    def spend(self) -> bool:
        """Take a hedge out of the budget; False when there is none."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
