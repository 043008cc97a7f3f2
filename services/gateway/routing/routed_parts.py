"""The experts of one job's tokens, from whichever attempts they come."""

from __future__ import annotations

from loraplex.api.output import RoutedExperts, joined_experts
from loraplex.api.request import WorkerRequest
from loraplex.errors import Unavailable


class RoutedParts:
    """Collects the experts that a worker returns, each position once, until tokens come.

    A position's experts belong to the adapters that chose the token after it, so what came before
    the first token of an attempt that failed is forgotten with the attempt.
    """

    def __init__(self, request: WorkerRequest) -> None:
        self._num_prompt = len(request.prompt_ids)
        self._end = self._taken = request.routed_from
        """Where the parts end, and where those that were taken end; None = nobody asks."""
        self._parts: list[RoutedExperts] = []

    def restart(self) -> int | None:
        """Forget the parts that were not taken. Returns the position from which an attempt
        continues."""
        self._parts.clear()
        self._end = self._taken
        return self._end

    def add(self, part: RoutedExperts | None) -> None:
        """Add the experts of an event. Raises: Unavailable on a gap."""
        if self._end is None or part is None:
            return
        if part.start > self._end:
            raise Unavailable("the worker skipped the experts of a position", reason="PROTOCOL")
        if part.end > self._end:
            self._parts.append(part.between(self._end, part.end))
            self._end = part.end

    def take(self, num_output: int) -> RoutedExperts | None:
        """The parts since the last call, given the number of output tokens by now.

        Raises:
            Unavailable: some are missing.
        """
        if self._end is None:
            return None
        if self._end != self._num_prompt + num_output - 1:
            raise Unavailable("the worker left out the experts of a position", reason="PROTOCOL")
        joined = joined_experts(self._parts)
        self._parts.clear()
        self._taken = self._end
        return joined
