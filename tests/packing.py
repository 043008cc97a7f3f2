"""Packed logprobs as tests write them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from loraplex.api.output import PackedLogprobs, TokenLogprob


def packed_logprobs(entries: Sequence[TokenLogprob]) -> PackedLogprobs:
    """The logprobs of positions that have the same number of candidates."""
    flat = [pair for entry in entries for pair in ((entry.token_id, entry.logprob), *entry.top)]
    return PackedLogprobs(
        len(entries[0].top) if entries else 0,
        array("I", [token_id for token_id, _ in flat]).tobytes(),
        array("f", [logprob for _, logprob in flat]).tobytes(),
        array("I", [entry.rank for entry in entries]).tobytes(),
    )
