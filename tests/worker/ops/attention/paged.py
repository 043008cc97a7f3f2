"""What attention receives for one step over the paged cache."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.ops.attention.metadata import AttentionMetadata, KvCacheParams


def row_of(request_id: str, prompt_ids: list[int]) -> SimpleNamespace:
    """A sequence, as far as attention may ask."""
    return SimpleNamespace(request=SimpleNamespace(request_id=request_id, prompt_ids=prompt_ids))


def paged_metadata(
    kind: type[AttentionMetadata],
    kv: KvBuffer,
    lens: Sequence[int],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    **others: object,
) -> AttentionMetadata:
    """Prepared. `lens`: new tokens of each sequence, contexts first; `starts`: those computed."""
    contexts = [num for num in lens if num > 1]
    positions = [s + i for s, num in zip(starts, lens, strict=True) for i in range(num)]
    metadata = kind(
        num_contexts=len(contexts),
        num_generations=len(lens) - len(contexts),
        num_tokens=sum(lens),
        num_ctx_tokens=sum(contexts),
        seq_lens=torch.tensor(lens),
        rows=[row_of(str(i), [0] * num) for i, num in enumerate(lens)],
        kv_cache_params=KvCacheParams(
            use_cache=True,
            num_cached_tokens_per_seq=tuple(starts),
            block_tables=(tables,),
        ),
        kv_cache_manager=kv,
        position_ids=torch.tensor(positions, device=device),
        **others,
    )
    metadata.prepare()
    return metadata
