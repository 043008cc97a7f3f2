"""Prints /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.printing import Head, prompt_id_fields, token_id_fields
from services.gateway.request import Piece


class ChatPrinter:
    """Prints the pieces of one conversation, in a stream or as a whole."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._begun: set[int] = set()
        """Indices of choices whose role is out."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.index not in self._begun:
            chunks.append(self._opening(piece.index))
            self._begun.add(piece.index)
        shows_ids = self._head.call.return_token_ids or self._wants_logprobs(piece.index)
        if piece.text or piece.finish_reason or (shows_ids and piece.token_ids):
            delta = {"content": piece.text} if piece.text or not piece.finish_reason else {}
            chunks.append(self._chunk([self._choice(piece, "delta", delta)]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return self._head.object(_CHUNK, []) | {"usage": self._head.usage()}

    def whole(self, choices: Sequence[Piece]) -> dict[str, Any]:
        printed = [
            self._choice(
                piece,
                "message",
                {"role": "assistant", "content": piece.text, "refusal": None},
                with_prompt=True,
            )
            for piece in choices
        ]
        body = self._head.object("chat.completion", printed) | {"usage": self._head.usage()}
        return body | prompt_id_fields(self._head)

    def _opening(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._head.call.return_token_ids:
            choice["prompt_token_ids"] = list(self._head.of_choice(index).prompt_ids)
        chunk = self._chunk([choice])
        return chunk if self._begun else chunk | prompt_id_fields(self._head)

    def _choice(
        self, piece: Piece, part: str, content: dict[str, Any], *, with_prompt: bool = False
    ) -> dict[str, Any]:
        return {
            "index": piece.index,
            part: content,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **token_id_fields(self._head, piece, with_prompt=with_prompt),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head.object(_CHUNK, choices)
        return chunk | {"usage": None} if self._head.call.include_usage else chunk

    def _wants_logprobs(self, index: int) -> bool:
        return self._head.of_choice(index).call.sampling.logprobs is not None

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        prepared = self._head.of_choice(piece.index)
        num_top = prepared.call.sampling.logprobs
        return None if num_top is None else chat_logprobs(prepared.tokens, piece, num_top)


_CHUNK = "chat.completion.chunk"
