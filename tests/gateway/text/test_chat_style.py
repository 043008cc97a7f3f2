"""The style of answers is read off the chat template."""

from __future__ import annotations

import pytest

from loraplex_services.gateway.text.chat_style import (
    ChatStyle,
    StyleSettings,
    ToolFormat,
    detected,
)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ messages }}", ChatStyle()),
        (
            "{% if tools %}<tools>...</tools> within <tool_call></tool_call>",
            ChatStyle(ToolFormat.HERMES),
        ),
        ("<tool_call> {% if '</think>' in content %}", ChatStyle(ToolFormat.HERMES, thinks=True)),
        ("<tool_call>\n<function=name>", ChatStyle(ToolFormat.QWEN3_CODER)),
        ("<tool_call>{function-name}\n<arg_key>", ChatStyle(ToolFormat.GLM)),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", ChatStyle(ToolFormat.PHI4_MINI)),
        ("use [func_name1(params_name1=params_value1)]", ChatStyle(ToolFormat.PYTHONIC)),
        ("{{ '[TOOL_CALLS] [' }}[AVAILABLE_TOOLS]", ChatStyle(ToolFormat.MISTRAL)),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", ChatStyle(ToolFormat.HARMONY)),
        ("Environment: ipython {{ '<|python_tag|>' }}", ChatStyle(ToolFormat.LLAMA3_JSON)),
    ],
)
def test_templates_show_their_style(template: str, style: ChatStyle) -> None:
    assert detected(template) == style


def test_a_setting_beats_what_was_detected() -> None:
    found = ChatStyle(ToolFormat.HERMES, thinks=True)
    assert StyleSettings().over(found) == found
    assert StyleSettings("mistral", "none").over(found) == ChatStyle(ToolFormat.MISTRAL)
    assert StyleSettings("none", "think").over(ChatStyle()) == ChatStyle(thinks=True)
