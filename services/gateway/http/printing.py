"""What completions and chat share when they print: the head, usage and collected choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.http.calls import OpenAICall
from services.gateway.pipeline.prepared import Prepared
from services.gateway.request import Piece, Target


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response repeats."""

    completion_id: str
    created_unix_s: int
    call: OpenAICall
    prepared: Sequence[Prepared]
    """One per prompt; choice i*n + j belongs to prompt i."""

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.prepared[0].resolved.num_choices

    def of_choice(self, index: int) -> Prepared:
        """The prompt that a choice belongs to."""
        return self.prepared[index // self.num_choices]

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response or chunk without usage."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.call.model,
            "choices": choices,
        }

    def usage(self) -> dict[str, Any]:
        """Token counts over all prompts and choices."""
        prompt = sum(p.usage.prompt_tokens for p in self.prepared)
        completion = sum(p.usage.completion_tokens for p in self.prepared)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(p.usage.cached_tokens for p in self.prepared)
            },
        }

    def headers(self) -> dict[str, str]:
        """Of the whole call."""
        return headers_of(self.prepared[0].target)


def headers_of(target: Target) -> dict[str, str]:
    """Headers that say what ran; none for the base alone."""
    adapters = target.adapters
    if not adapters:
        return {}
    return {
        "x-loraplex-adapter": ", ".join(adapter.label for adapter in adapters),
        "x-loraplex-digest": ", ".join(adapter.digest for adapter in adapters),
    }


@dataclass(slots=True)
class Collected:
    """All pieces of one choice, added up."""

    pieces: list[Piece] = field(default_factory=list)

    def sum(self) -> Piece:
        """One piece that says it all."""
        pieces = self.pieces
        return Piece(
            index=pieces[0].index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(i for piece in pieces for i in piece.token_ids),
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
            offsets=tuple(offset for piece in pieces for offset in piece.offsets),
            finish_reason=pieces[-1].finish_reason,
            stop_reason=pieces[-1].stop_reason,
            prompt_logprobs=pieces[0].prompt_logprobs,
        )


class Printer(Protocol):
    """Completions or chat."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Stream objects for a piece; none when it says nothing new to this caller."""

    def usage_chunk(self) -> dict[str, Any]:
        """The last stream object with include_usage."""

    def whole(self, choices: Sequence[Piece]) -> dict[str, Any]:
        """The one object of a response that is not streamed; `choices` in order of index."""


def token_id_fields(head: Head, piece: Piece, *, with_prompt: bool) -> dict[str, Any]:
    """Extra fields of a choice with return_token_ids."""
    if not head.call.return_token_ids:
        return {}
    fields: dict[str, Any] = {"token_ids": list(piece.token_ids)}
    if with_prompt:
        fields["prompt_token_ids"] = list(head.of_choice(piece.index).prompt_ids)
    return fields


def prompt_id_fields(head: Head) -> dict[str, Any]:
    """Extra field of a response to one prompt with return_token_ids."""
    if not head.call.return_token_ids or len(head.prepared) > 1:
        return {}
    return {"prompt_token_ids": list(head.prepared[0].prompt_ids)}
