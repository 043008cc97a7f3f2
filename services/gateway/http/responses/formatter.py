"""Formats answers as the items and events of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loraplex.api.output import FinishReason, TokenLogprob, WeightSpan
from loraplex.errors import LoraplexError, codes_of
from loraplex_services.gateway.http.blocks import (
    AnswerBlocks,
    Block,
    BlockEvent,
    BlockKind,
    BlockStep,
)
from loraplex_services.gateway.http.formatting import Formatter, ResponseInfo
from loraplex_services.gateway.http.logprobs import LogprobEntry, chat_logprobs
from loraplex_services.gateway.http.responses.items import encoded_thought
from loraplex_services.gateway.http.responses.parse import ResponsesCall
from loraplex_services.gateway.request import TextDelta

_PREFIXES = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_STEPS = {
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}
_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"

Event = dict[str, Any]


class ResponsesFormatter(Formatter):
    """Formats the answer to one request, streamed or complete."""

    def __init__(
        self, info: ResponseInfo, call: ResponsesCall, keep: Callable[[dict[str, Any]], object]
    ) -> None:
        """`keep(response)` gets the finished response before the client does."""
        self._info = info
        self._call = call
        self._keep = keep
        self._answers = info.answers()
        self._blocks = AnswerBlocks()
        self._finish_reason: FinishReason | None = None
        self._is_over = False
        self._num_events = 0
        self._logprobs = _TextLogprobs(info)
        self._spans: list[WeightSpan] = []

    def chunks(self, text_delta: TextDelta) -> list[Event]:
        opening = [] if self._num_events else self._opening()
        return [*opening, *self._events(self._read(text_delta))]

    def ending(self) -> list[Event]:
        events = self._events(self._closing())
        body = self._finished()
        return [*events, self._event(f"response.{body['status']}", response=body)]

    def failure(self, error: LoraplexError) -> Event:
        is_busy = codes_of(error).http in (429, 503)
        code = "rate_limit_exceeded" if is_busy else "server_error"
        fault = {"code": code, "message": error.message}
        body = self._body("failed", self._output(_INCOMPLETE)) | {"error": fault}
        return self._event("response.failed", response=body)

    def full_body(self, choices: Sequence[TextDelta]) -> dict[str, Any]:
        [text_delta] = choices
        self._read(text_delta)
        self._closing()
        return self._finished()

    def _read(self, text_delta: TextDelta) -> list[BlockEvent]:
        self._finish_reason = text_delta.finish_reason
        self._spans += text_delta.spans
        delta = self._answers.read(text_delta)
        if self._call.shows_logprobs:
            self._logprobs.add(text_delta, self._answers.content_begin(text_delta.index))
        return self._blocks.add(delta)

    def _closing(self) -> list[BlockEvent]:
        """The end of the answer; one without any output has an empty message."""
        self._is_over = True
        if self._blocks.blocks:
            return self._blocks.close()
        return [*self._blocks.open_new(BlockKind.TEXT), *self._blocks.close()]

    def _finished(self) -> dict[str, Any]:
        is_cut = self._finish_reason is FinishReason.LENGTH
        status = _INCOMPLETE if is_cut else _COMPLETED
        body = self._body(status, self._output(status))
        if is_cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        self._keep(body)
        return body

    def _opening(self) -> list[Event]:
        body = self._body(_IN_PROGRESS, []) | {"usage": None}
        return [
            self._event("response.created", response=body),
            self._event("response.in_progress", response=body),
        ]

    def _events(self, steps: Sequence[BlockEvent]) -> list[Event]:
        return [event for step in steps for event in self._step_events(step)]

    def _step_events(self, step: BlockEvent) -> list[Event]:
        block, name = step.block, _STEPS[step.block.kind]
        is_call = block.kind is BlockKind.CALL
        location: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        part_location = location if is_call else location | {"content_index": 0}
        is_text = block.kind is BlockKind.TEXT
        match step.step:
            case BlockStep.OPENED:
                item = self._item(block, _IN_PROGRESS, is_empty=True)
                added = self._event(
                    "response.output_item.added", output_index=block.index, item=item
                )
                if is_call:
                    return [added]
                part = self._part(block, is_empty=True)
                return [
                    added,
                    self._event("response.content_part.added", **part_location, part=part),
                ]
            case BlockStep.GREW:
                shown = {"logprobs": self._logprobs.take()} if is_text else {}
                return [self._event(f"{name}.delta", **part_location, delta=step.text, **shown)]
            case BlockStep.CLOSED:
                item = self._item(block, self._last_status())
                if is_call:
                    fields = {"arguments": block.text, "name": item["name"]}
                    events = [self._event(f"{name}.done", **location, **fields)]
                else:
                    part = self._part(block)
                    shown = {"logprobs": part["logprobs"]} if is_text else {}
                    events = [
                        self._event(f"{name}.done", **part_location, text=block.text, **shown),
                        self._event("response.content_part.done", **part_location, part=part),
                    ]
                events.append(
                    self._event("response.output_item.done", output_index=block.index, item=item)
                )
                return events

    def _last_status(self) -> str:
        """Status of the item that ends now; the last one may have been cut off."""
        is_cut = self._is_over and self._finish_reason is FinishReason.LENGTH
        return _INCOMPLETE if is_cut else _COMPLETED

    def _output(self, status: str) -> list[dict[str, Any]]:
        """All items; only the last one can be unfinished."""
        items = [self._item(block, _COMPLETED) for block in self._blocks.blocks[:-1]]
        return items + [self._item(block, status) for block in self._blocks.blocks[-1:]]

    def _id(self, block: Block) -> str:
        """An id from which the response's follows."""
        stem = self._info.completion_id.partition("_")[2]
        return f"{_PREFIXES[block.kind]}_{stem}{block.index:04x}"

    def _item(self, block: Block, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block)}
        content = [] if is_empty else [self._part(block)]
        if block.kind is BlockKind.CALL:
            assert block.call is not None, "a call"
            fields = {"call_id": block.call.call_id, **self._name(block.call.name)}
            arguments = "" if is_empty else block.text
            status = _IN_PROGRESS if is_empty else _COMPLETED
            item |= {"type": "function_call", **fields, "arguments": arguments, "status": status}
        elif block.kind is BlockKind.TEXT:
            item |= {"type": "message", "role": "assistant", "status": status, "content": content}
        else:
            item |= {"type": "reasoning", "summary": [], "content": content, "status": status}
            if self._call.encodes_thoughts and not is_empty:
                item["encrypted_content"] = encoded_thought(block.text)
        return item

    def _name(self, name: str) -> dict[str, str]:
        """The name of a called function, as it was offered."""
        if name not in self._call.namespaces:
            return {"name": name}
        namespace, name = self._call.namespaces[name]
        return {"name": name, "namespace": namespace}

    def _part(self, block: Block, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else block.text
        if block.kind is BlockKind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if is_empty else self._logprobs.shown
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        info, sampling = self._info, self._info.prepared[0].resolved.sampling
        return {
            "id": info.completion_id,
            "object": "response",
            "created_at": info.created_unix_s,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "max_output_tokens": info.call.calls[0].sampling.max_tokens,
            "model": info.call.model,
            "output": output,
            "parallel_tool_calls": info.call.tool_use.is_parallel,
            "previous_response_id": self._call.previous_id or None,
            "store": self._call.stores,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": info.call.calls[0].sampling.logprobs or 0,
            "truncation": "disabled",
            "usage": _usage(self._info.chat_usage(self._answers)),
            **(info.weights(0, self._spans) if self._is_over else {}),
            **self._call.echoed,
        }


class _TextLogprobs:
    """Logprobs of the tokens of the text, which begins after the thought."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._undecided: list[tuple[int, TokenLogprob]] = []
        """Tokens with their offsets, as long as they may belong to a thought."""
        self.shown: list[LogprobEntry] = []
        """Logprobs of the whole text so far."""
        self._num_taken = 0

    def add(self, text_delta: TextDelta, content_begin: int | None) -> None:
        """More tokens. `content_begin` is the offset of the text; None = not known yet."""
        self._undecided += zip(text_delta.offsets, text_delta.logprobs, strict=True)
        if content_begin is None:
            return
        entries = tuple(entry for begin, entry in self._undecided if begin >= content_begin)
        self._undecided = []
        delta = TextDelta(0, logprobs=entries)
        self.shown += chat_logprobs(self._info.names(0), delta)["content"]

    def take(self) -> list[LogprobEntry]:
        """Logprobs that were not taken before."""
        taken, self._num_taken = self.shown[self._num_taken :], len(self.shown)
        return taken


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Usage in the form of the Responses API. Writes to the prefix cache are not counted."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
