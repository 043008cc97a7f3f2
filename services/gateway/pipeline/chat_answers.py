"""Separates the answers of a chat into reasoning, content and tool calls, for every API."""

from __future__ import annotations

from bisect import bisect_left

from loraplex.api.output import FinishReason
from loraplex_services.gateway.http.calls import OpenAICall
from loraplex_services.gateway.http.formatting import (
    CompletionTokenDetails,
    ResponseInfo,
    UsageInfo,
)
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.text.detokenize import decode_all
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.reader import Delta
from loraplex_services.gateway.tools.readers import reader_of

_TAIL_TOKENS = 8
"""Enough of the end of a prompt to see whether it ends inside a thought."""


class ChatAnswers:
    """The answers of one request as they grow, one per choice."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._answers: dict[int, AnswerParser] = {}
        self._offsets: dict[int, list[int]] = {}
        """Where the tokens of each choice begin, up to the end of its thought. Where thoughts are
        messages on channels, any token may be one of a thought."""
        self._thoughts: dict[int, list[tuple[int, int]]] = {}
        """Character offsets of the thoughts on channels."""

    def read(self, text_delta: TextDelta) -> Delta:
        """The new parts of a choice's answer, by kind."""
        if text_delta.index not in self._answers:
            prepared = self._info.of_choice(text_delta.index)
            self._answers[text_delta.index] = _parser(prepared, self._info.call)
        reply = self._answers[text_delta.index]
        tool_format = self._info.of_choice(text_delta.index).style.tool_format
        if reply.may_think or tool_format is ToolFormat.HARMONY:
            self._offsets.setdefault(text_delta.index, []).extend(text_delta.offsets)
        delta = reply.feed(text_delta.text)
        if text_delta.finish_reason is not None:
            rest = reply.finish()
            delta.content += rest.content
            delta.reasoning += rest.reasoning
            delta.calls += rest.calls
            delta.thoughts += rest.thoughts
        self._thoughts.setdefault(text_delta.index, []).extend(delta.thoughts)
        return delta

    def ends_with_calls(self, text_delta: TextDelta) -> bool:
        """Whether this text delta ends its choice normally and the choice has calls."""
        is_stopped = text_delta.finish_reason is FinishReason.STOP
        return is_stopped and self._answers[text_delta.index].num_calls > 0

    def content_begin(self, index: int) -> int | None:
        """Character offset in a choice at which its content begins; None = not known yet."""
        reply = self._answers[index]
        return None if reply.may_think else reply.content_begin

    def num_thought_tokens(self) -> int:
        """Tokens of reasoning so far, over all choices."""
        count = 0
        for index, offsets in self._offsets.items():
            for begin, end in (self._answers[index].thought_chars, *self._thoughts[index]):
                count += bisect_left(offsets, end) - bisect_left(offsets, begin)
        return count

    def usage(self) -> UsageInfo:
        """Token counts in chat's form, which count the tokens of thoughts."""
        details: CompletionTokenDetails = {"reasoning_tokens": self.num_thought_tokens()}
        return {**self._info.usage(), "completion_tokens_details": details}


def ends_in_thought(prepared: PreparedRequest) -> bool:
    """Whether the prompt opened a thought, which the answer continues."""
    marks = prepared.style.marks
    tail = prepared.prompt_ids[-_TAIL_TOKENS:]
    return (
        decode_all(prepared.tokens, tail, skip_special=False)
        .rstrip()
        .endswith(marks.opens + marks.title)
    )


def _parser(prepared: PreparedRequest, call: OpenAICall) -> AnswerParser:
    """The parser of one answer. In a response format all of it is content or calls, and never a
    thought."""
    style = prepared.style
    thinks = style.thinks and call.grammar is None
    return AnswerParser(
        thinks=thinks,
        is_thinking=thinks and ends_in_thought(prepared),
        tools=reader_of(style.tool_format, call.tool_use),
        marks=style.marks,
    )
