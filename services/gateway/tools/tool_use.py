"""The tools of one chat request, as far as its answer depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loraplex.api.sampling import Grammar

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that one request offers and how they may be used."""

    tools: tuple[dict[str, Any], ...] = ()
    """As the caller wrote them; the chat template gets them unchanged."""
    must_call: bool = False
    """The answer is a list of calls."""
    named: str = ""
    """The answer is the arguments of this function."""
    is_strict: bool = False
    """Optional calls are constrained to the schemas."""
    is_parallel: bool = True
    """The model may make several calls."""
    grammar: Grammar | None = None
    """The grammar that enforces `must_call` or `named`."""

    @property
    def names(self) -> frozenset[str]:
        """Functions offered."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of the arguments of each."""
        return {tool["function"]["name"]: parameters_of(tool) for tool in self.tools}


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a function's arguments; by default it takes none."""
    return tool["function"].get("parameters") or _NO_PARAMETERS
