"""Formats answers as the content blocks and events of the Messages API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from loraplex.api.output import FinishReason, WeightSpan
from loraplex.errors import LoraplexError
from loraplex_services.gateway.http.blocks import (
    AnswerBlocks,
    Block,
    BlockEvent,
    BlockKind,
    BlockStep,
)
from loraplex_services.gateway.http.errors import messages_error
from loraplex_services.gateway.http.formatting import Formatter, ResponseInfo
from loraplex_services.gateway.request import TextDelta

Event = dict[str, Any]


class MessagesFormatter(Formatter):
    """Formats the answer to one request, streamed or complete."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._answers = info.answers()
        self._blocks = AnswerBlocks()
        self._last = TextDelta(0)
        self._has_begun = False
        self._spans: list[WeightSpan] = []

    def chunks(self, text_delta: TextDelta) -> list[Event]:
        opening = [] if self._has_begun else [self._opening(text_delta)]
        self._has_begun = True
        return [*opening, *self._events(self._read(text_delta))]

    def ending(self) -> list[Event]:
        return [
            *self._events(self._blocks.close()),
            {"type": "message_delta", "delta": self._stop(), **self._facts()},
            {"type": "message_stop"},
        ]

    def failure(self, error: LoraplexError) -> Event:
        return messages_error(error)

    def full_body(self, choices: Sequence[TextDelta]) -> dict[str, Any]:
        [text_delta] = choices
        self._read(text_delta)
        content = [_content(block) for block in self._blocks.blocks]
        return self._message(content) | self._stop() | self._facts()

    def _facts(self) -> dict[str, Any]:
        """Fields that are known at the end: the usage, and which weights computed which tokens."""
        return {"usage": self._usage(), **self._info.weights(0, self._spans)}

    def _read(self, text_delta: TextDelta) -> list[BlockEvent]:
        self._last = text_delta
        self._spans += text_delta.spans
        return self._blocks.add(self._answers.read(text_delta))

    def _opening(self, text_delta: TextDelta) -> Event:
        """The message without content; its usage leaves out tokens that were not sent yet."""
        usage = self._usage()
        usage["output_tokens"] -= len(text_delta.token_ids)
        stop = {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": self._message([]) | stop | {"usage": usage}}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._info.completion_id,
            "type": "message",
            "role": "assistant",
            "model": self._info.call.model,
            "content": content,
        }

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended, and the stop sequence that ended it."""
        matched = self._last.stop_reason if isinstance(self._last.stop_reason, str) else None
        if self._last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif any(block.kind is BlockKind.CALL for block in self._blocks.blocks):
            reason = "tool_use"
        else:
            reason = "end_turn" if matched is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        """Counts in which input_tokens are those that no cache held."""
        usage = self._info.chat_usage(self._answers)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_thought_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": num_thought_tokens},
        }

    def _events(self, steps: Sequence[BlockEvent]) -> list[Event]:
        return [event for step in steps for event in _step_events(step)]


def _step_events(step: BlockEvent) -> list[Event]:
    block = step.block
    match step.step:
        case BlockStep.OPENED:
            empty = _content(block, is_empty=True)
            return [{"type": "content_block_start", "index": block.index, "content_block": empty}]
        case BlockStep.GREW:
            return [_delta(block, _DELTAS[block.kind], step.text)]
        case BlockStep.CLOSED:
            closed = [{"type": "content_block_stop", "index": block.index}]
            if block.kind is BlockKind.THOUGHT:
                signature = _delta(block, ("signature_delta", "signature"), _signature(block.text))
                return [signature, *closed]
            return closed


_DELTAS = {
    BlockKind.THOUGHT: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def _delta(block: Block, names: tuple[str, str], text: str) -> Event:
    kind, field = names
    return {
        "type": "content_block_delta",
        "index": block.index,
        "delta": {"type": kind, field: text},
    }


def _content(block: Block, *, is_empty: bool = False) -> dict[str, Any]:
    text = "" if is_empty else block.text
    if block.kind is BlockKind.THOUGHT:
        signature = "" if is_empty else _signature(text)
        return {"type": "thinking", "thinking": text, "signature": signature}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": text, "citations": None}
    assert block.call is not None, "a call"
    fields = {"id": block.call.call_id, "name": block.call.name}
    return {"type": "tool_use", **fields, "input": json.loads(text) if text.strip() else {}}


def _signature(thought: str) -> str:
    """The signature of a thought, without which clients drop it: a digest that nothing checks."""
    return "sha256:" + hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()
