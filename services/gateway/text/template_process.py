"""The process that renders chat templates: reads jobs from stdin, writes texts to stdout.

A template comes with a model and is not trusted. It runs in jinja2's immutable sandbox, in a
separate process that holds no secrets, opens nothing and has a memory limit; the parent kills it
when it takes too long. Jobs and answers are UTF-8 JSON.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex_services.common.chat_template import template_environment
from loraplex_services.common.limits import TEMPLATES
from loraplex_services.common.processes.job_process import limit_memory, read_setup, serve

MAX_OUTPUT_CHARS = 16 << 20


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    env = template_environment()
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
        _compiled.cache_clear()  # other templates must not leave too little for the next one
        return {"error": "it needs too much memory"}
    except Exception as error:
        return {"error": type(error).__name__}
    if len(text) > MAX_OUTPUT_CHARS:
        return {"error": f"it renders more than {MAX_OUTPUT_CHARS} characters"}
    return {"text": text}


def _answer(job: bytes) -> bytes:
    try:
        fields = json.loads(job)
        return json.dumps(render(fields["template"], fields["variables"])).encode()
    except MemoryError:
        return json.dumps({"error": "it needs too much memory"}).encode()


def main() -> None:
    """Serve jobs until stdin closes."""
    limit_memory(TEMPLATES.memory_bytes)
    read_setup()
    serve(_answer)


if __name__ == "__main__":
    main()
