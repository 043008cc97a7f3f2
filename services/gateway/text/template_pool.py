"""A pool of processes that render chat templates; one that exceeds the time limit is killed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from loraplex.errors import InvalidRequest, Unavailable
from services.common.piped_process import start_module
from services.gateway.text.template_process import FRAME

MAX_TEMPLATE_CHARS = 256 << 10


class _Renderer:
    """One process, started when first needed and again after it died. One job at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, frame: bytes) -> dict[str, str]:
        """Send a job and await its answer. Raises: EOFError, OSError if the process died."""
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(FRAME.pack(len(frame)) + frame)
        await process.stdin.drain()
        (length,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
        answer: dict[str, str] = json.loads(await process.stdout.readexactly(length))
        return answer

    def kill(self) -> None:
        """End the process at once; the next job starts another."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        process = self._process
        self.kill()
        if process is not None:
            await process.communicate()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await start_module("services.gateway.text.template_process")
        return self._process


class TemplatePool:
    """Renders templates; at most `size` at a time, each within `timeout_s`."""

    def __init__(self, size: int = 2, timeout_s: float = 2.0) -> None:
        self._idle: asyncio.LifoQueue[_Renderer] = asyncio.LifoQueue()
        self._all = [_Renderer() for _ in range(size)]
        for renderer in self._all:
            self._idle.put_nowait(renderer)
        self._timeout_s = timeout_s
        self._started: set[_Renderer] = set()

    async def render(self, template: str, variables: dict[str, Any]) -> str:
        """The template's text. Raises: InvalidRequest naming chat_template or messages."""
        if len(template) > MAX_TEMPLATE_CHARS:
            raise _bad_template(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
        frame = json.dumps({"template": template, "variables": variables}).encode()
        renderer = await self._idle.get()
        try:
            answer = await self._ask(renderer, frame)
        finally:
            self._idle.put_nowait(renderer)
        return _text_of(answer)

    async def close(self) -> None:
        """End all processes."""
        for renderer in self._all:
            await renderer.close()

    async def _ask(self, renderer: _Renderer, frame: bytes) -> dict[str, str]:
        # The first job of a process gets more time, because it includes the start of Python.
        is_warm = renderer in self._started
        try:
            async with asyncio.timeout(self._timeout_s if is_warm else self._timeout_s + 15):
                answer = await renderer.ask(frame)
        except TimeoutError:
            self._drop(renderer)
            raise _bad_template(f"it took longer than {self._timeout_s:g} s") from None
        except (EOFError, OSError):
            self._drop(renderer)
            raise Unavailable("the chat template's process died; try again") from None
        except BaseException:
            self._drop(renderer)
            raise
        self._started.add(renderer)
        return answer

    def _drop(self, renderer: _Renderer) -> None:
        renderer.kill()
        self._started.discard(renderer)


def _text_of(answer: dict[str, str]) -> str:
    if "text" in answer:
        return answer["text"]
    if "refused" in answer:
        said = answer["refused"] or "the chat template rejects this conversation"
        raise InvalidRequest.field("messages", "", said)
    raise _bad_template(answer["error"])


def _bad_template(why: str) -> InvalidRequest:
    return InvalidRequest.field(
        "chat_template", "", f"rendering failed: {why}; send a text or token prompt instead"
    )
