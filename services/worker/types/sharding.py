"""How tensor-parallel ranks divide a base: which features of a site each rank has. No tensors.

The cut is Megatron's: the first linear of a block by outputs, the second by inputs, so that a block
ends with one sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex.errors import Unsupported
from loraplex_services.worker.types.model_config import KvHeads, ModelConfig, RecurrenceConfig

Span = tuple[int, int]
"""Features [begin, end)."""
Segments = tuple[tuple[int, int], ...]
"""(features, units) of each part of a stacked matrix. A unit, such as a head, is never divided."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the weight of a site is divided; without segments every rank has all of it."""

    outputs: Segments = ()
    inputs: Segments = ()


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a group."""

    rank: int = 0
    size: int = 1

    def spans(self, segments: Segments) -> tuple[Span, ...]:
        """The parts of stacked segments that this rank has, ascending. A segment with fewer units
        than there are ranks is replicated: several ranks have the same unit."""
        spans = []
        begin = 0
        for features, units in segments:
            width = features // units
            count = max(1, units // self.size)
            first = begin + self.rank * units // self.size * width
            spans.append((first, first + count * width))
            begin += features
        return tuple(spans)

    def vocabulary(self, vocab_size: int) -> Span:
        """The token ids whose rows of the embedding and the head this rank has."""
        return share_of(vocab_size, self.rank, self.size)


ONLY = Shard()
"""The one rank of a base that is not divided."""


def padded_share(num_rows: int, size: int) -> int:
    """Number of rows on each rank of a table that may be divided at any row, such as one of tokens.
    The last ranks' rows may end with zeros."""
    return -(-num_rows // size)


def share_of(num_rows: int, rank: int, size: int) -> Span:
    """The rows of such a table that one rank has, without the zeros."""
    share = padded_share(num_rows, size)
    return min(rank * share, num_rows), min((rank + 1) * share, num_rows)


def within(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The parts of spans within [begin, end), counted from `begin`."""
    cut = [(max(first, begin) - begin, min(last, end) - begin) for first, last in spans]
    return [(first, last) for first, last in cut if first < last]


def num_features(spans: Sequence[Span]) -> int:
    """Features of all spans together."""
    return sum(last - first for first, last in spans)


def local_range(spans: Sequence[Span], begin: int, end: int) -> tuple[int, int]:
    """Where features [begin, end) lie in the concatenated spans: (begin, length). They are
    contiguous there, because spans ascend."""
    return num_features(within(spans, 0, begin)), num_features(within(spans, begin, end))


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The base as one rank's attention and recurrence see it: with its own heads only."""
    if shard.size == 1:
        return config
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=_own_count(config.num_kv_heads, shard),
        own_kv_heads=tuple(
            KvHeads(_own_count(heads.count, shard), heads.dim) for heads in config.own_kv_heads
        ),
        recurrence=config.recurrence and local_recurrence(config.recurrence, shard),
    )


def local_recurrence(recurrence: RecurrenceConfig, shard: Shard) -> RecurrenceConfig:
    """Gated delta nets with the heads of one rank only."""
    return replace(
        recurrence,
        num_key_heads=recurrence.num_key_heads // shard.size,
        num_value_heads=recurrence.num_value_heads // shard.size,
    )


def _own_count(num_kv_heads: int, shard: Shard) -> int:
    return max(1, num_kv_heads // shard.size)


def check_divisible(config: ModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks that would cut a head or a neuron of the base.

    Raises:
        Unsupported: naming the field of config.json that the number does not divide.
    """
    widths = {
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
    }
    if config.moe is not None:
        if not config.moe.dense_layers:
            del widths["intermediate_size"]
        widths["moe_intermediate_size"] = config.moe.intermediate_size
        if config.moe.shared_intermediate_size:
            widths["shared_expert_intermediate_size"] = config.moe.shared_intermediate_size
    if config.recurrence is not None:  # value heads are a multiple of them
        widths["linear_num_key_heads"] = config.recurrence.num_key_heads
    for name, value in widths.items():
        if value % num_ranks:
            raise _indivisible(name, value, num_ranks, "it must be a multiple of the ranks")
    for num_kv_heads in sorted({heads.count for heads in config.kv_heads}):
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            why = "it must be a multiple or a divisor of the ranks"
            raise _indivisible("num_key_value_heads", num_kv_heads, num_ranks, why)


def _indivisible(name: str, value: int, num_ranks: int, why: str) -> Unsupported:
    description = (
        f"cannot be divided among {num_ranks} tensor-parallel ranks: {why}; "
        "set --tensor-parallel to another number"
    )
    return Unsupported.field(f"config.json:{name}", value, description)
