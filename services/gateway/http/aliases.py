"""The calls with which vLLM's users load and unload adapters, if the operator allows them.

Loading publishes a folder of this machine in the registry, with the caller's key; unloading deletes
what was published this way.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loraplex.client.registry_client import RegistryClient
from loraplex.errors import AdapterNotFound, PermissionDenied
from loraplex.refs import check_name
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.guard import api_key_of
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.lora_folders import LABEL, SOURCE, LoraFolders

_LOADS = {
    "/v1/load_lora_adapter": False,
    "/load_lora_adapter": True,
    "/skyrl/v1/load_lora_adapter": True,
}
"""Whether a call replaces an existing adapter if the body does not say so. vLLM's calls do not;
those that prime-rl and SkyRL add do."""
_UNLOADS = ("/v1/unload_lora_adapter", "/unload_lora_adapter")


@dataclass(frozen=True, slots=True, eq=False)
class AliasEndpoints:
    """Endpoints over the registry's own client."""

    caller: Callable[[Request], Awaitable[Caller]]
    client: Callable[[str], RegistryClient]
    """The registry as seen by the holder of an API key ("" without keys)."""
    folders: LoraFolders

    def routes(self) -> list[Route]:
        loads = [
            Route(path, functools.partial(self.load, in_place=in_place), methods=["POST"])
            for path, in_place in _LOADS.items()
        ]
        return loads + [Route(path, self.unload, methods=["POST"]) for path in _UNLOADS]

    async def load(self, request: Request, *, in_place: bool) -> Response:
        """POST load_lora_adapter: a name that exists is replaced only in place."""
        caller = await self.caller(request)
        fields = await read_json(request, caller)
        name, folder, in_place = parse_load(fields, in_place=in_place)
        version = await self.folders.load(
            api_key_of(request), caller, name, folder, in_place=in_place
        )
        return PlainTextResponse(
            f"Success: LoRA adapter '{name}' added successfully.",
            headers={"x-loraplex-adapter": version.ref, "x-loraplex-digest": version.digest},
        )

    async def unload(self, request: Request) -> Response:
        """POST unload_lora_adapter: deletes all versions, if `load` made them."""
        caller = await self.caller(request)
        name = parse_unload(await read_json(request, caller))
        async with self.client(api_key_of(request)) as registry:
            found = [
                version
                async for version in registry.list(
                    tenant=caller.tenant, name=name, all_versions=True
                )
            ]
            if not found:
                raise AdapterNotFound(name)
            if any(version.labels.get(LABEL) != SOURCE for version in found):
                raise PermissionDenied(
                    f"{name!r} has versions that were not loaded here; use `registry delete`"
                )
            await registry.delete(name, every=True, force=True)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def parse_load(fields: dict[str, Any], *, in_place: bool = False) -> tuple[str, str, bool]:
    """Body of a load: name, folder, and whether it may replace what has the name.

    Raises: InvalidRequest, Unsupported.
    """
    body = Body(fields)
    name, folder = _name(body), body.text("lora_path") or ""
    in_place = body.flag("load_inplace", default=in_place)
    body.integer("lora_int_id")
    body.flag("is_3d_lora_weight")
    body.finish()
    return name, folder, in_place


def parse_unload(fields: dict[str, Any]) -> str:
    """Body of an unload: the name. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    name = _name(body)
    body.integer("lora_int_id")
    body.finish()
    return name


def _name(body: Body) -> str:
    return check_name(body.text("lora_name") or "", field="lora_name")
