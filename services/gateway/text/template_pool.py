"""Renders chat templates in processes that tenants share."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import TEMPLATES, PoolLimits
from loraplex_services.common.processes.process_pool import JobFailed, ProcessPool

MAX_TEMPLATE_CHARS = 256 << 10
_MODULE = "loraplex_services.gateway.text.template_process"


class TemplatePool:
    """Renders templates within the limits of their processes."""

    def __init__(self, limits: PoolLimits = TEMPLATES) -> None:
        self._pool = ProcessPool(_MODULE, limits)
        self._timeout_s = limits.timeout_s

    async def render(
        self,
        template: str,
        variables: dict[str, Any],
        *,
        tenant: str = "",
        is_adapters: bool = False,
    ) -> str:
        """The template's text.

        Args:
            tenant: whose conversation it is; tenants get the processes in rotation.
            is_adapters: the template is an adapter's own. One that runs out of time is refused for
                a while, so that it does not hold the processes that all tenants share. A base's is
                not: one tenant's conversation must not end the chats of all.

        Raises: InvalidRequest naming chat_template or messages; ResourceExhausted, Unavailable if
            no process is free.
        """
        if len(template) > MAX_TEMPLATE_CHARS:
            raise _bad_template(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
        job = json.dumps({"template": template, "variables": variables}).encode()
        key = hashlib.sha256(template.encode(errors="surrogatepass")).digest()
        try:
            answer = await self._pool.ask(tenant, job, key if is_adapters else None)
        except JobFailed as failed:
            raise _bad_template(self._reason(failed)) from None
        return _text_of(json.loads(answer))

    def _reason(self, failed: JobFailed) -> str:
        if failed.is_repeated:
            return "it ran out of time or memory a moment ago"
        if failed.is_late:
            return f"it took longer than {self._timeout_s:g} s"
        return "its process died"

    async def close(self) -> None:
        """End all processes."""
        await self._pool.close()


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
