"""Sends the requests of a trace through a gateway at their times, independent of the answers (open
loop).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing

from loraplex.api.sampling import Sampling
from loraplex.client.generation import Model
from loraplex.client.inference_client import InferenceClient
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex.workload import RequestOutcome, TracedRequest

TEXT_VOCAB = 256
"""Prompts contain ids below this number, which every vocabulary has."""


async def targets(client: InferenceClient, num_adapters: int, prefix: str) -> list[Model]:
    """The base, then `num_adapters` adapters whose id starts with `prefix`, as the gateway lists.

    Raises:
        InvalidRequest: there are fewer.
    """
    models = [model async for model in client.models()]
    bases = [model for model in models if not model.digest]
    adapters = [model for model in models if model.digest and model.id.startswith(prefix)]
    if not bases or len(adapters) < num_adapters:
        raise InvalidRequest.field(
            "--adapters",
            num_adapters,
            f"the gateway lists {len(adapters)}: publish more, or let --prepare-from do it",
        )
    return [bases[0], *adapters[:num_adapters]]


async def check_lengths(client: InferenceClient, max_tokens: int) -> None:
    """Raises InvalidRequest when the workload's longest request could not be served."""
    base = (await targets(client, 0, ""))[0]
    if base.max_model_len and max_tokens > base.max_model_len:
        raise InvalidRequest.field(
            "--lengths",
            max_tokens,
            f"prompt and output together may have {base.max_model_len} tokens on {base.id}; choose "
            f"shorter ones, such as {base.max_model_len // 4},{base.max_model_len // 4}",
        )


async def drive(
    client: InferenceClient,
    trace: Sequence[TracedRequest],
    models: Sequence[Model],
    seed: int,
    first_token_s: float | None = None,
) -> list[RequestOutcome]:
    """Send every request at its time and wait for all. `models[0]` is the base.

    A request that fails is an outcome, not an error.
    """
    begin_s = time.monotonic()

    async def send(index: int, request: TracedRequest) -> RequestOutcome:
        model = models[0 if request.adapter is None else request.adapter + 1]
        prompt = random_prompt(f"{seed}/{index}", request.num_input)
        await asyncio.sleep(begin_s + request.arrival_s - time.monotonic())
        return await _one(client, model.id, prompt, request, begin_s, first_token_s)

    return await asyncio.gather(*(send(i, request) for i, request in enumerate(trace)))


def random_prompt(seed: str, num_tokens: int) -> list[int]:
    """Token ids. Prompts of other seeds begin differently, except by chance."""
    rng = random.Random(seed)
    return [rng.randrange(TEXT_VOCAB) for _ in range(num_tokens)]


async def _one(
    client: InferenceClient,
    model: str,
    prompt: list[int],
    request: TracedRequest,
    begin_s: float,
    first_token_s: float | None,
) -> RequestOutcome:
    """
    Args:
        begin_s: when the trace began.
        first_token_s: how long the first token may take.
    """
    sampling = Sampling(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
    arrived_s: float | None = None
    engine_s: float | None = None
    num_output = 0
    reason = ""
    try:
        answer = client.generate(model, prompt, sampling, first_token_s=first_token_s)
        async with aclosing(answer) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and arrived_s is None:
                    arrived_s = time.monotonic() - begin_s
                num_output += len(chunk.token_ids)
                if chunk.timings:
                    engine_s = chunk.timings.queue_s + chunk.timings.prefill_s
    except LoraplexError as error:
        reason = error.reason
    end_s = time.monotonic() - begin_s
    finished = not reason and num_output == request.num_output
    reason = reason or ("" if finished else "ENDED_EARLY")
    return RequestOutcome(
        arrival_s=request.arrival_s,
        first_token_s=arrived_s,
        end_s=end_s,
        num_output=num_output,
        finished=finished,
        reason=reason,
        engine_s=engine_s,
    )
