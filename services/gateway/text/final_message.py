"""Prompts that end with their last message, so that the output continues it.

A template writes something after each message. To find where the content of the last one ends, a
mark is appended to it before the conversation is rendered.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from loraplex.errors import InvalidRequest

_MARK = f"end-{secrets.token_hex(16)}"
"""Drawn at random when the process starts, so that no conversation contains it."""


def with_end_mark(messages: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
    """The messages with a mark and a space after the last. Raises: InvalidRequest if it has no
    text."""
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str):
        raise InvalidRequest.field(
            f"messages[{len(before)}].content", "", "continue_final_message needs text to continue"
        )
    return (*before, {**last, "content": f"{content}{_MARK} "})


def cut_at_end_mark(rendered: str) -> str:
    """The text before the mark. Raises: InvalidRequest if the template left it out.

    A template that strips contents took the space after the mark away, and would have taken the
    white space before it.
    """
    text, mark, after = rendered.rpartition(_MARK)
    if not mark:
        raise InvalidRequest.field(
            "continue_final_message", "true", "the chat template does not render the last message"
        )
    return text if after.startswith(" ") else text.rstrip()
