"""The chat template that a model's files contain, and the Jinja environment for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A chat template and the names it may use."""

    template: str
    special_tokens: Mapping[str, str]


def _json_file(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    content = files.get(name)
    loaded = json.loads(content) if content else {}
    return loaded if isinstance(loaded, dict) else {}


def chat_format(files: Mapping[str, bytes]) -> ChatFormat | None:
    """The chat template of a model's files, by name; None without one. Raises: ValueError."""
    config = _json_file(files, "tokenizer_config.json")
    template: Any = config.get("chat_template")
    template = _json_file(files, "chat_template.json").get("chat_template", template)
    if "chat_template.jinja" in files:
        template = files["chat_template.jinja"].decode()
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default")
    if not isinstance(template, str) or not template:
        return None
    return ChatFormat(template, special_tokens(files))


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, such as `eos_token`. Raises:
    ValueError."""
    config = _json_file(files, "tokenizer_config.json")
    return {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}


def _token_text(token: object) -> str | None:
    """Configs write a special token as text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


class _Generation(Extension):
    """`{% generation %}` marks assistant messages for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like the filter of transformers, which unlike jinja2's does not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def template_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox in which templates are compiled, with the filters of transformers."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    return env
