"""The process that renders chat templates: reads jobs from stdin, writes texts to stdout.

A template comes with a model and is not trusted. It runs in jinja2's immutable sandbox, in a
separate process that holds no secrets, opens nothing and has a memory limit; the parent kills it
when it takes too long. Frames both ways are a 4-byte big-endian length and UTF-8 JSON.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import struct
import sys
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

FRAME = struct.Struct(">I")
MAX_MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARS = 16 << 20


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


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


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


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


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def render(source: str, variables: dict[str, Any]) -> dict[str, str]:
    """One of {"text"}, {"refused": why the template gave up}, {"error": kind of failure}.

    The error message of a template may contain the user's text: it is passed on only where it
    stands, word for word, in the template itself.
    """
    try:
        text = _compiled(source).render(**variables)
    except _Refused as error:
        said = str(error)
        return {"refused": said if said in source else ""}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:
        return {"error": type(error).__name__}
    if len(text) > MAX_OUTPUT_CHARS:
        return {"error": f"it renders more than {MAX_OUTPUT_CHARS} characters"}
    return {"text": text}


def _read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        sys.exit(0)
    return data


def main() -> None:
    """Serve jobs until stdin closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        (length,) = FRAME.unpack(_read_exactly(source, FRAME.size))
        job = json.loads(_read_exactly(source, length))
        answer = json.dumps(render(job["template"], job["variables"])).encode()
        sink.write(FRAME.pack(len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    main()
