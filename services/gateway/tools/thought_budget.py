"""Rules of answers whose thought has a limited number of tokens.

A thought is what is between two marks, each a single token of the base. It is counted in tokens, so
the closing mark may follow any of them, also one that ends inside a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex.errors import Unsupported
from loraplex_services.gateway.text.chat_style import ChatStyle

FIELD = "thinking_token_budget"


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """How long a thought may be."""

    num_tokens: int
    """At most; 0 or more."""
    eos_token_ids: Sequence[int]
    """Tokens that end an answer of the base, which are not allowed in a thought."""


def with_budget(
    rest: str,
    style: ChatStyle,
    budget: ThoughtBudget,
    find_token: Callable[[str], int | None],
    *,
    is_thinking: bool,
) -> str:
    """The rules of an answer whose thought is within its budget.

    Args:
        rest: the rules of what follows the thought, `start` first; "" = anything but a thought.
        find_token: as `call_grammar.FindToken`.
        is_thinking: the prompt ended inside a thought.

    Raises: Unsupported if the base marks no thoughts, or not with single tokens.
    """
    opens, closes = (find_token(mark) for mark in (style.marks.opens, style.marks.closes))
    if not style.thinks or opens is None or closes is None:
        why = "this base has no marks of thoughts that are single tokens; leave it out"
        raise Unsupported.field(FIELD, budget.num_tokens, why)
    thought = f"<[{closes}]>"
    if budget.num_tokens:
        thought = f"part{{0,{budget.num_tokens}}} {thought}"
    if not is_thinking:
        thought = f"(<[{opens}]> {thought})?"
    rest = rest.replace("start:", "rest:", 1) or f"rest: (<[^{opens}]>)*\n"
    others = ",".join(map(str, (opens, closes, *budget.eos_token_ids)))
    return f"start: {thought} rest\npart: <[^{others}]>\n{rest}"
