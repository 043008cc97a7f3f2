"""Separates the answers of a chat into reasoning, content and tool calls, for every API."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from loraplex.api.output import FinishReason
from loraplex.api.sampling import Grammar
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.text.detokenize import decode_all
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.reader import Delta
from loraplex_services.gateway.tools.readers import reader_of
from loraplex_services.gateway.tools.tool_use import ToolUse

_TAIL_TOKENS = 8
"""Enough of the end of a prompt to see whether it ends inside a thought."""


class ChatAnswers:
    """The answers of one request as they grow, one per choice."""

    def __init__(
        self,
        of_choice: Callable[[int], PreparedRequest],
        tool_use: ToolUse,
        answer_format: Grammar | None,
    ) -> None:
        """
        Args:
            of_choice: the request that a choice belongs to.
            answer_format: constrains answers that are not calls, which then contain no thought.
        """
        self._of_choice = of_choice
        self._tool_use = tool_use
        self._has_format = answer_format is not None
        self._answers: dict[int, AnswerParser] = {}
        self._offsets: dict[int, list[int]] = {}
        """Where the tokens of each choice begin, up to the end of its thought. Where thoughts are
        messages on channels, any token may be one of a thought."""
        self._thoughts: dict[int, list[tuple[int, int]]] = {}
        """Character offsets of the thoughts on channels."""

    def read(self, text_delta: TextDelta) -> Delta:
        """The new parts of a choice's answer, by kind."""
        style = self._of_choice(text_delta.index).style
        if text_delta.index not in self._answers:
            self._answers[text_delta.index] = self._parser(text_delta.index)
        reply = self._answers[text_delta.index]
        if reply.may_think or style.tool_format is ToolFormat.HARMONY:
            self._offsets.setdefault(text_delta.index, []).extend(text_delta.offsets)
        delta = reply.feed(text_delta.text)
        if text_delta.finish_reason is not None:
            delta.add(reply.finish())
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

    def _parser(self, index: int) -> AnswerParser:
        prepared = self._of_choice(index)
        thinks = prepared.style.thinks and not self._has_format
        return AnswerParser(
            thinks=thinks,
            is_thinking=thinks and ends_in_thought(prepared),
            tools=reader_of(prepared.style.tool_format, self._tool_use),
            marks=prepared.style.marks,
        )


def ends_in_thought(prepared: PreparedRequest) -> bool:
    """Whether the prompt opened a thought, which the answer continues."""
    marks = prepared.style.marks
    tail = prepared.prompt_ids[-_TAIL_TOKENS:]
    return (
        decode_all(prepared.tokens, tail, skip_special=False)
        .rstrip()
        .endswith(marks.opens + marks.title)
    )


def with_marks(
    prepared: PreparedRequest, *, is_chat: bool, offers_tools: bool = False
) -> PreparedRequest:
    """A request whose text keeps the special tokens that mark calls and channels, if it is read."""
    style, resolved = prepared.style, prepared.resolved
    is_read = offers_tools or (is_chat and style.has_channels)
    if not (is_read and style.marks_are_special):
        return prepared
    text = replace(resolved.text, skip_special=False)
    return replace(prepared, resolved=replace(resolved, text=text))
