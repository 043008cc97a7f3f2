"""The output tokens of simulated requests.

They repeat from time to time, as real outputs do, so that the scheduler's drafts are found and
accepted about as often as on the worker whose step trace was fitted.
"""

from __future__ import annotations

import random
from weakref import WeakKeyDictionary

from loraplex_services.simulate.costs import Costs
from loraplex_services.worker.scheduling.drafts import NUM_MATCHED
from loraplex_services.worker.types.request import Request

ID_BITS = 29
"""Size of token ids. Equal ones hardly ever occur by chance."""


class SimulatedText:
    """Each request repeats one token or not, and each of its tokens may change that. A repetition
    does not end before the scheduler has found it: traces show only those that it finds."""

    def __init__(self, costs: Costs, seed: int) -> None:
        self._costs = costs
        self._rng = random.Random(seed)
        self._repeated: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()
        """The token that a request repeats now, and how often it has been generated."""

    def next_token(self, request: Request) -> int:
        """The token that the sampler chooses next for a request."""
        if not self._costs.repeat_begin:
            return 0
        repeated, count = self._repeated.get(request, (None, 0))
        if repeated is not None:
            if count <= NUM_MATCHED or self._rng.random() >= self._costs.repeat_end:
                self._repeated[request] = repeated, count + 1
                return repeated
        token = self._rng.getrandbits(ID_BITS)
        if repeated is not None:
            del self._repeated[request]
        elif self._rng.random() < self._costs.repeat_begin:
            self._repeated[request] = token, 1
        return token
