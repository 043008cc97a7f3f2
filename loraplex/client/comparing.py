"""Scores two versions of an adapter on the same requests."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loraplex.api.output import TokenLogprob
from loraplex.api.sampling import Sampling
from loraplex.client.divergence import LOWEST_PRIORITY
from loraplex.client.generation import Mirrored
from loraplex.client.inference_client import InferenceClient, collect
from loraplex.errors import InvalidRequest

SCORER_TIMEOUT_S = 600.0


class Comparison(Protocol):
    """Compares a candidate with the version that answered a request."""

    async def difference(self, mirrored: Mirrored) -> float:
        """How much better the candidate is; negative where it is worse."""


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """Compares how likely the answer that was served is under each version.

    The difference is the mean log-probability per token, in nats. It shows damage, and any other
    departure from what is served; it cannot show that a different answer is a better one.
    """

    client: InferenceClient
    served: str
    """Reference to the version that answers now."""
    candidate: str

    async def difference(self, mirrored: Mirrored) -> float:
        """The difference in nats per token. Sends two requests of the lowest priority."""
        ids = (*mirrored.prompt_ids, *mirrored.token_ids)
        num_answer = len(mirrored.token_ids)
        candidate = await self._mean_logprob(self.candidate, ids, num_answer)
        return candidate - await self._mean_logprob(self.served, ids, num_answer)

    async def _mean_logprob(self, model: str, ids: Sequence[int], num_answer: int) -> float:
        sampling = Sampling(max_tokens=0, echo=True, prompt_logprobs=0)
        scored: list[TokenLogprob | None] = []
        async for chunk in self.client.generate(model, ids, sampling, priority=LOWEST_PRIORITY):
            scored.extend(chunk.prompt_logprobs)
        answer = [entry.logprob for entry in scored[-num_answer:] if entry is not None]
        return sum(answer) / len(answer)


@dataclass(frozen=True, slots=True)
class ScorerComparison:
    """Compares the answers by a command that the user provides.

    The command runs once. For each answer it reads a line of JSON with `prompt`, `answer` and
    `version`, and writes a line with a score from 0 to 1; higher is better.
    """

    client: InferenceClient
    candidate: str
    process: asyncio.subprocess.Process
    """The running command."""

    async def difference(self, mirrored: Mirrored) -> float:
        """The difference of the two scores. Sends one request of the lowest priority."""
        sampling = replace(mirrored.sampling, n=None)
        chunks = [
            chunk
            async for chunk in self.client.generate(
                self.candidate, mirrored.prompt_ids, sampling, priority=LOWEST_PRIORITY
            )
        ]
        candidate = await self._score(mirrored.prompt_text, collect(chunks).text, "candidate")
        return candidate - await self._score(mirrored.prompt_text, mirrored.text, "served")

    async def _score(self, prompt: str, answer: str, version: str) -> float:
        """Raises: InvalidRequest if the command does not answer with a score."""
        assert self.process.stdin is not None and self.process.stdout is not None, "piped"
        line = json.dumps({"prompt": prompt, "answer": answer, "version": version})
        try:
            self.process.stdin.write(line.encode() + b"\n")
            await self.process.stdin.drain()
            async with asyncio.timeout(SCORER_TIMEOUT_S):
                reply = (await self.process.stdout.readline()).decode(errors="replace").strip()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            reply = ""
        try:
            score = float(reply)
        except ValueError:
            score = math.nan
        if not 0 <= score <= 1:
            why = "must write a number from 0 to 1 for each line that it reads"
            raise InvalidRequest.field("--scorer", reply[:100], why)
        return score
