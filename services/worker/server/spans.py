"""The span of a request at a worker: its phases, digests, counts and steps.

The phases follow from the times that the engine reports with a request's last output. For a request
that is cancelled, as after a stop string, there is no such report: only its `decode` is known.
"""

from __future__ import annotations

import time

from loraplex_services.worker.server.sessions import ServerRequest
from loraplex_services.worker.types.messages import TokenOutput


def end_span(
    request: ServerRequest, outcome: str, last: TokenOutput | None = None, last_step: int = 0
) -> None:
    """End the span of a request.

    Args:
        request: which has ended.
        outcome: "ok", "cancelled" or the reason of an error.
        last: its last output, if it was not ended early.
        last_step: the engine's step that chose it.
    """
    now_s, span, digests = time.monotonic(), request.span, list(request.digests)
    decode_start_s = request.first_token_s
    if last is not None and last.timings is not None:
        timings = last.timings
        arrival_s, started_s = request.arrival_s, request.arrival_s + timings.queue_s
        decode_start_s = started_s + timings.prefill_s
        if digests:
            end_s = arrival_s + timings.load_s
            span.child("adapter load", arrival_s, end_s, {"loraplex.adapter.digests": digests})
        span.child("queue", arrival_s, started_s)
        span.child("prefill", started_s, decode_start_s, {"loraplex.step": request.first_step})
    if decode_start_s is not None and request.num_output > 1:
        span.child("decode", decode_start_s, now_s, {"loraplex.step": last_step})
    attributes = {
        "loraplex.request_id": request.request_id,
        "loraplex.adapter.digests": digests,
        "gen_ai.usage.input_tokens": request.num_prompt,
        "gen_ai.usage.output_tokens": request.num_output,
    }
    span.end(now_s, outcome, attributes)
