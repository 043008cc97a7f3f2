"""The tools of a chat request, as far as the answer depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that one request offers and how they may be used."""

    tools: tuple[dict[str, Any], ...] = ()
    """Tools as the caller wrote them; the chat template gets them unchanged."""
    must_call: bool = False
    """The answer consists of calls, after its thought."""
    named: str = ""
    """The one function that the answer must call."""
    is_strict: bool = False
    """Optional calls are constrained to the schemas."""
    is_parallel: bool = True
    """The model may make several calls."""

    @property
    def names(self) -> frozenset[str]:
        """Functions offered."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of the arguments of each function that may be called."""
        functions = [tool["function"] for tool in self.tools]
        return {
            function["name"]: function.get("parameters") or _NO_PARAMETERS
            for function in functions
            if self.named in ("", function["name"])
        }
