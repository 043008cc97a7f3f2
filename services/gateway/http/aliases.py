"""/v1/load_lora_adapter and /v1/unload_lora_adapter as vLLM's users call them, where allowed.

Loading publishes a folder of this machine in the registry, with the caller's key; unloading deletes
what was published this way. Folders outside the one that the operator opened are out of reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import (
    AdapterNotFound,
    LoraplexError,
    NotFound,
    PermissionDenied,
    Violation,
)
from loraplex.refs import check_name
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import SERVICE_KEY_IDS
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.request import with_names

_LABEL, _SOURCE = "published-by", "load_lora_adapter"
_LABELS = {_LABEL: _SOURCE}


class AliasEndpoints:
    """Endpoints over the registry's own client."""

    def __init__(
        self,
        caller: Callable[[Request], Awaitable[Caller]],
        client: Callable[[str], RegistryClient],
        root: Path,
    ) -> None:
        """
        Args:
            client: the registry as seen by the holder of an API key ("" without keys).
            root: the folder that adapters may be loaded from.
        """
        self._caller = caller
        self._client = client
        self._root = root.resolve()

    def routes(self) -> list[Route]:
        """Both paths."""
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: the same content again is the same version."""
        caller = await self._caller(request)
        body = Body(await read_json(request, caller.tenant))
        name, folder = _name(body), body.text("lora_path") or ""
        body.flag("load_inplace")
        body.finish()
        _require_publisher(caller)
        path = await asyncio.to_thread(self._inside, folder)
        publication = Publication(name, labels=_LABELS)
        async with self._client(_key(request)) as registry:
            try:
                await registry.upload(path, publication)
            except LoraplexError as error:
                raise _without_path(with_names(error, {"name": "lora_name"}), path) from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: deletes all versions, if `load` made them."""
        caller = await self._caller(request)
        body = Body(await read_json(request, caller.tenant))
        name = _name(body)
        body.integer("lora_int_id")
        body.finish()
        async with self._client(_key(request)) as registry:
            found = [version async for version in registry.list(name=name, all_versions=True)]
            if not found:
                raise AdapterNotFound(name)
            if any(version.labels.get(_LABEL) != _SOURCE for version in found):
                raise PermissionDenied(
                    f"{name!r} has versions that were not loaded here; use `registry delete`"
                )
            await registry.delete(name, every=True, force=True)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _inside(self, folder: str) -> Path:
        """The folder with links resolved. Raises: NotFound unless it is below the root."""
        try:
            path = (self._root / folder).resolve()
            is_there = bool(folder) and path.is_relative_to(self._root) and path.is_dir()
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            why = "there is no such folder in LORAPLEX_LORA_ROOT on the gateway's machine"
            raise NotFound(f"lora_path: {why}", violations=[Violation("lora_path", "", why)])
        return path


def _require_publisher(caller: Caller) -> None:
    """Before anything is read. Raises: PermissionDenied."""
    is_limited = caller.key_id not in SERVICE_KEY_IDS
    if is_limited and not caller.scopes & {"publisher", "admin", "root"}:
        raise PermissionDenied("this needs a key with the scope 'publisher'")


def _without_path(error: LoraplexError, path: Path) -> LoraplexError:
    """The error without the place of the folder on this machine. Mutates: error."""

    def cut(text: str) -> str:
        return text.replace(f"{path}/", "").replace(str(path), path.name)

    error.message = cut(error.message)
    error.args = (error.message,)
    error.violations = tuple(
        Violation(cut(v.field), cut(v.value), cut(v.description)) for v in error.violations
    )
    return error


def _name(body: Body) -> str:
    return check_name(body.text("lora_name") or "", field="lora_name")


def _key(request: Request) -> str:
    """The registry authorises these calls by the caller's own key."""
    return request.headers.get("authorization", "").partition(" ")[2].strip()
