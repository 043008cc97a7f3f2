"""Required calls from a real engine, by the official client, with templates in published styles.

The base was never trained on calls: the grammar alone brings every answer to its end. Its tokens
are bytes and its context is short, so the templates name the functions only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.stack import DEMO, Stack

NAMES = "{{ tools | map(attribute='function.name') | join }}"
MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
TEMPLATES = {
    "hermes": (
        "{% if tools %}<tools>" + NAMES + "</tools>"
        'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.{% endif %}'
        + MESSAGES
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{# a thought is left out: </think> #}"
    ),
    "thinking": (
        "{% if tools %}<tool_call>"
        + NAMES
        + "</tool_call>{% endif %}"
        + MESSAGES
        + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
    ),
    "llama3": (
        "{% if tools %}Environment: ipython\n" + NAMES + "{% endif %}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content }}<|eot_id|>{% endfor %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]" + NAMES + "[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{# [TOOL_CALLS] #}"
    ),
    "coder": (
        "{% if tools %}" + NAMES + " Use <tool_call><function=name>"
        "<parameter=key>value</parameter></function></tool_call>{% endif %}" + MESSAGES
    ),
    "glm": (
        "[gMASK]<sop>{% if tools %}" + NAMES + " Use <tool_call>name"
        "<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>{% endif %}" + MESSAGES
    ),
    "gemma": (
        "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        "{% if tools %}<|tool>" + NAMES + "<tool|>{% endif %}{# <|tool_call>call: #}"
    ),
    "silent": MESSAGES,
}


def _tool(name: str, values: list[str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": values}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool("heat", ["C", "F"]), _tool("wind", ["km/h", "kn"])]


@pytest.fixture(scope="module")
def client(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> openai.OpenAI:
    """Every template is that of one adapter."""
    for style, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp("adapters") / style
        shutil.copytree(DEMO / "adapters" / "upper", folder)
        (folder / "chat_template.jinja").write_text(template)
        stack.publish(Path(folder), name=f"calls-{style}")
    return openai.OpenAI(base_url=stack.http + "/v1", api_key="ignored", max_retries=0)


def _ask(client: openai.OpenAI, style: str, **fields: Any) -> Any:
    body: dict[str, Any] = {
        "model": f"calls-{style}",
        "messages": [{"role": "user", "content": "How warm is it?"}],
        "tools": TOOLS,
        "temperature": 1.0,
        "seed": 5,
        **fields,
    }
    return client.chat.completions.create(**body)


@pytest.mark.parametrize("style", [style for style in TEMPLATES if style != "thinking"])
def test_every_required_answer_ends_with_a_call_that_fits_its_schema(
    client: openai.OpenAI, style: str
) -> None:
    answer = _ask(client, style, tool_choice="required", parallel_tool_calls=False, n=4)
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        fits = {"heat": ("C", "F"), "wind": ("km/h", "kn")}[call.function.name]
        assert json.loads(call.function.arguments)["unit"] in fits


@pytest.mark.parametrize("style", [style for style in TEMPLATES if style != "thinking"])
def test_a_named_function_is_called_once(client: openai.OpenAI, style: str) -> None:
    named = {"type": "function", "function": {"name": "wind"}}
    answer = _ask(client, style, tool_choice=named, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        (call,) = choice.message.tool_calls
        assert call.function.name == "wind"
        assert json.loads(call.function.arguments)["unit"] in ("km/h", "kn")


def test_a_base_that_was_told_to_think_may_think_before_it_calls(client: openai.OpenAI) -> None:
    """This base never ends its thought; the answer is cut there and holds no call."""
    answer = _ask(client, "thinking", tool_choice="required", max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.reasoning and not choice.message.tool_calls
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_stream_holds_the_same_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    complete = _ask(client, "hermes", **fields).choices[0].message.tool_calls[0].function
    stream = _ask(client, "hermes", stream=True, **fields)
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        (complete.name, complete.arguments)
    ]
