"""How a base writes tool calls and reasoning, detected in its chat template or set explicitly."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class ToolFormat(enum.StrEnum):
    """The notation in which a model writes tool calls."""

    NONE = "none"
    HERMES = "hermes"
    """`<tool_call>{"name", "arguments"}</tool_call>`: Hermes, Qwen 2.5 and 3."""
    LLAMA3_JSON = "llama3_json"
    """`{"name", "parameters"}` as the whole answer: Llama 3.1 and later."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]` and a list of objects, or name and arguments."""
    QWEN3_CODER = "qwen3_coder"
    """`<function=name><parameter=key>value</parameter></function>`: Qwen3-Coder and Qwen 3.5."""
    PHI4_MINI = "phi4_mini_json"
    """`functools[{"name", "arguments"}]`, or `<|tool_call|>` instead: Phi-4-mini."""
    GLM = "glm"
    """`<tool_call>name`, `<arg_key>` and `<arg_value>` pairs, `</tool_call>`: GLM-4.5 and later."""
    HARMONY = "harmony"
    """Messages on channels, of which some go to functions: gpt-oss. Thoughts are messages as
    well."""
    GEMMA4 = "gemma4"
    """`<|tool_call>call:name{key:value}<tool_call|>`: Gemma 4."""
    PYTHONIC = "pythonic"
    """`[name(key=value)]` as the whole answer: small Llama 3.2 models and Gemma 3 as prompted."""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks around a thought."""

    opens: str
    closes: str
    title: str = ""
    """Text right after the opening mark."""


THINK = ThoughtMarks("<think>", "</think>")
CHANNEL = ThoughtMarks("<|channel>", "<channel|>", "thought")
"""Gemma 4."""


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """The notations to look for in the text of a chat's answer."""

    tool_format: ToolFormat = ToolFormat.NONE
    thinks: bool = False
    """Answers may begin with a thought between marks."""
    marks: ThoughtMarks = THINK

    @property
    def marks_are_special(self) -> bool:
        """True if calls begin with a special token, which plain text leaves out."""
        return self.tool_format in _SPECIAL_MARKS or self.has_channels

    @property
    def has_channels(self) -> bool:
        """True if all answers have marks, with and without tools."""
        has_thoughts = self.thinks and self.marks is CHANNEL
        return self.tool_format is ToolFormat.HARMONY or has_thoughts


_SPECIAL_MARKS = (
    ToolFormat.LLAMA3_JSON,
    ToolFormat.MISTRAL,
    ToolFormat.PHI4_MINI,
    ToolFormat.GEMMA4,
)


def detected(template: str) -> ChatStyle:
    """The style that a chat template uses; "" has none."""
    marks = CHANNEL if CHANNEL.closes in template else THINK
    return ChatStyle(_tool_format(template), marks.closes in template, marks)


@dataclass(frozen=True, slots=True)
class StyleSettings:
    """Settings of an operator for the answers of every base; "auto" = as detected."""

    tool_format: str = "auto"
    """"auto", or a `ToolFormat`."""
    reasoning: str = "auto"
    """"auto", "think" or "none"."""

    def over(self, style: ChatStyle) -> ChatStyle:
        """The style with these settings."""
        return replace(
            style,
            tool_format=style.tool_format
            if self.tool_format == "auto"
            else ToolFormat(self.tool_format),
            thinks=style.thinks if self.reasoning == "auto" else self.reasoning == "think",
        )


AS_DETECTED = StyleSettings()


def _tool_format(template: str) -> ToolFormat:
    if "<|channel|>" in template:
        return ToolFormat.HARMONY
    if "<|tool_call>" in template:
        return ToolFormat.GEMMA4
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return ToolFormat.GLM
        return ToolFormat.QWEN3_CODER if "<function=" in template else ToolFormat.HERMES
    if "<|tool|>" in template or "functools[" in template:
        return ToolFormat.PHI4_MINI
    if "func_name1(" in template:
        return ToolFormat.PYTHONIC
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.NONE
