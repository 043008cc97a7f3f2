"""A pool of processes that render chat templates; one that exceeds the time limit is killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from loraplex.errors import InvalidRequest, Unavailable
from loraplex_services.common.piped_process import start_module
from loraplex_services.common.recent import Recent
from loraplex_services.gateway.event_loop import now_s
from loraplex_services.gateway.text.template_process import FRAME

MAX_TEMPLATE_CHARS = 256 << 10
START_TIMEOUT_S = 15.0
"""The start of Python, with nothing to render."""
REFUSED_S = 30.0
"""How long an adapter's template is refused after it ran out of time."""
_MAX_REFUSED = 1024
_NOTHING = json.dumps({"template": "", "variables": {}}).encode()


class _TookTooLong(Exception):
    """A job exceeded its time limit."""


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
            self._process = await start_module("loraplex_services.gateway.text.template_process")
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
        self._refused: Recent[bytes, float] = Recent(_MAX_REFUSED)
        """When an adapter's template ran out of time, by its sha256."""

    async def render(
        self, template: str, variables: dict[str, Any], *, is_adapters: bool = False
    ) -> str:
        """The template's text.

        Args:
            is_adapters: the template is an adapter's own. One that runs out of time is refused for
                `REFUSED_S`, so that it does not hold the processes that all tenants share. A
                base's is not: one tenant's conversation must not end the chats of all.

        Raises: InvalidRequest naming chat_template or messages.
        """
        if len(template) > MAX_TEMPLATE_CHARS:
            raise _bad_template(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
        frame = json.dumps({"template": template, "variables": variables}).encode()
        key = hashlib.sha256(template.encode(errors="surrogatepass")).digest()
        renderer = await self._idle.get()
        try:
            if is_adapters:
                self._check_refused(key)
            answer = await self._ask(renderer, frame)
        except _TookTooLong:
            if is_adapters:
                self._refused.put(key, now_s())
            raise _bad_template(f"it took longer than {self._timeout_s:g} s") from None
        finally:
            self._idle.put_nowait(renderer)
        return _text_of(answer)

    def _check_refused(self, key: bytes) -> None:
        refused_s = self._refused.get(key)
        if refused_s is not None and now_s() - refused_s < REFUSED_S:
            raise _bad_template("it ran out of time a moment ago")

    async def close(self) -> None:
        """End all processes."""
        for renderer in self._all:
            await renderer.close()

    async def _ask(self, renderer: _Renderer, frame: bytes) -> dict[str, str]:
        """Raises: _TookTooLong, Unavailable."""
        try:
            if renderer not in self._started:
                # Apart from the job, whose time limit does not include the start of Python.
                async with asyncio.timeout(START_TIMEOUT_S):
                    await renderer.ask(_NOTHING)
                self._started.add(renderer)
            async with asyncio.timeout(self._timeout_s):
                return await renderer.ask(frame)
        except TimeoutError:
            was_started = renderer in self._started
            self._drop(renderer)
            if was_started:
                raise _TookTooLong from None
            raise Unavailable("the chat template's process does not start; try again") from None
        except (EOFError, OSError):
            self._drop(renderer)
            raise Unavailable("the chat template's process died; try again") from None
        except BaseException:
            self._drop(renderer)
            raise

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
