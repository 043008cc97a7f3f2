"""A base that thinks and calls tools, and what it says."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import EOS_ID, tokenizer_files

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>use <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>"
    "{% endfor %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}[assistant]<think></think>"
    "{% elif add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def says(stack: Stack, text: str) -> None:
    """What the worker answers from now on."""
    stack.workers[0].script = lambda _: [*text.encode(), EOS_ID]


def prompt_of(stack: Stack) -> str:
    """The prompt of the last request, as text."""
    return bytes(stack.workers[0].requests[-1].prompt_ids).decode()


async def started_talker(stack: Stack) -> Stack:
    """Start a stack whose base thinks and calls tools."""
    stack.workers[0].files = tokenizer_files(TEMPLATE)
    stack.workers[0].max_model_len = 2048
    await stack.start()
    return stack
