"""A request and the settings of an engine, with what a test leaves open filled in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.types.messages import EngineConfig, Submit


def make_submit(
    request_id: str,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    digests: Iterable[str] = (),
    came_s: float | None = None,
    **others: object,
) -> Submit:
    """Each adapter with weight 1."""
    adapters = AdapterSet(tuple((digest, 1.0) for digest in sorted(digests)))
    return Submit(
        request=WorkerRequest(
            request_id=request_id,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            adapters=adapters,
            **others,
        ),
        came_s=came_s,
    )


def make_config(**others: object) -> EngineConfig:
    """Of a small engine in float32, first come, first served."""
    fields = {
        "model_dir": "",
        "device": "cpu",
        "dtype": "float32",
        "arena_bytes": 0,
        "max_lora_rank": 64,
        "max_resident": 8,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
    }
    return EngineConfig(**{**fields, **others})
