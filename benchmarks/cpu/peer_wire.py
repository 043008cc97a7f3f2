"""Lines of JSON between `cpu.peers` and a peer in an environment of its own; standard library only.

A peer says `"ready"`, then answers each batch with {"wall_s": seconds from the submission of all
requests to the last token, "outputs": token ids of each request}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Batch:
    """Requests to be submitted at once, greedy, that do not end before their last token."""

    prompts: list[list[int]]
    adapters: list[int | None]
    """For each request, the index of its adapter on the peer's command line; None = the base."""
    num_tokens: int

    def to_line(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def answers() -> Callable[[Any], None]:
    """A function that sends an answer. Whatever else the process prints goes to its errors."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: Any) -> None:
        print(json.dumps(value), file=out, flush=True)

    return answer


def batches() -> Iterator[Batch]:
    """Until the input ends."""
    for line in sys.stdin:
        yield Batch(**json.loads(line))
