"""Is a concurrent history of one register equal to some order of its operations? (Wing and Gong)

Each operation takes effect at one moment between its call and its return. Operations that never
returned may have taken effect at any later moment, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

State = int | None


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on a register."""

    kind: str
    """read, write, or swap (compare-and-set)."""
    called: float
    returned: float = math.inf
    value: State = None
    """What was read, or is to be written."""
    expected: State = None
    """What a swap expects."""
    succeeded: bool = True
    """Whether a swap found what it expected."""

    def after(self, state: State) -> tuple[bool, State]:
        """Whether this operation can happen in `state`, and the state after it."""
        if self.kind == "read":
            return state == self.value, state
        if self.kind == "write":
            return True, self.value
        matches = state == self.expected
        return matches == self.succeeded, self.value if self.succeeded else state


def is_linearizable(history: Sequence[Operation]) -> bool:
    """Depth-first search over the orders that real time allows, remembering dead ends."""
    operations = sorted(history, key=lambda operation: operation.called)
    everything = (1 << len(operations)) - 1
    unfinished = sum(1 << i for i, op in enumerate(operations) if op.returned == math.inf)
    stack: list[tuple[int, State]] = [(0, None)]
    seen = set(stack)
    while stack:
        done, state = stack.pop()
        if done | unfinished == everything:
            return True
        waiting = [i for i in range(len(operations)) if not done >> i & 1]
        first_return = min(operations[i].returned for i in waiting)
        for index in waiting:
            if operations[index].called > first_return:
                break
            possible, then = operations[index].after(state)
            step = (done | 1 << index, then)
            if possible and step not in seen:
                seen.add(step)
                stack.append(step)
    return False
