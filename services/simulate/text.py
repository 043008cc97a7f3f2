"""The output tokens of simulated requests.

They repeat from time to time, as real outputs do, so that the scheduler's drafts are found and
accepted about as often as on the worker whose step trace was fitted.
"""

from __future__ import annotations

import math
import random
from weakref import WeakKeyDictionary

from loraplex.api.request import AdapterSet
from loraplex_services.simulate.costs import Costs
from loraplex_services.worker.scheduling.drafts import NUM_MATCHED
from loraplex_services.worker.types.request import Request

ID_BITS = 29
"""Size of token ids. Equal ones hardly ever occur by chance."""
PHRASE_TOKENS = 8
"""Length of a phrase. Between 4 and 32, it hardly matters."""


class SimulatedText:
    """All requests for the same adapters know one phrase, which they repeat or not. Each of their
    tokens may change that, so that drafts are found in earlier outputs, too. A repetition does not
    end before the scheduler has found it: traces show only those that it finds."""

    def __init__(self, costs: Costs, seed: int) -> None:
        self._begin, self._end = costs.repeat_begin, end_chance(costs.repeat_end)
        self._rng = random.Random(seed)
        self._phrases: dict[AdapterSet, list[int]] = {}
        self._repeated: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """How many tokens of its phrase a request has generated without a break."""

    def next_token(self, request: Request) -> int:
        """The token that the sampler chooses next for a request."""
        if not self._begin:
            return 0
        count = self._repeated.get(request, 0)
        may_end = count > NUM_MATCHED
        chance = self._begin if not count else 1.0 - self._end * may_end
        if self._rng.random() < chance:
            self._repeated[request] = count + 1
            return self._phrase(request.adapters)[count % PHRASE_TOKENS]
        self._repeated.pop(request, None)
        return self._rng.getrandbits(ID_BITS)

    def _phrase(self, adapters: AdapterSet) -> list[int]:
        if adapters not in self._phrases:
            ids = [self._rng.getrandbits(ID_BITS) for _ in range(PHRASE_TOKENS)]
            self._phrases[adapters] = ids
        return self._phrases[adapters]


def end_chance(refused: float) -> float:
    """The probability that a repetition ends, from that of a refused draft.

    A draft is what followed the same tokens the last time. It is refused if either that time or
    this time, but not both, the repetition ended: `refused = 2 * end * (1 - end)`.
    """
    return (1.0 - math.sqrt(max(0.0, 1.0 - 2.0 * refused))) / 2.0
