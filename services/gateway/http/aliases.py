"""The calls with which vLLM's users load and unload adapters, if the operator allows them.

Loading publishes a folder of this machine in the registry, with the caller's key; unloading deletes
what was published this way. Trainers ask for the server's settings first.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loraplex.client.registry_client import RegistryClient
from loraplex.errors import (
    AdapterNotFound,
    InvalidRequest,
    PermissionDenied,
    Unavailable,
    Violation,
)
from loraplex.refs import check_name
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.guard import api_key_of
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.lora_folders import LABEL, SOURCE, LoraFolders
from loraplex_services.gateway.request import ServedModel

LOADS = {
    "/v1/load_lora_adapter": False,
    "/load_lora_adapter": True,
    "/skyrl/v1/load_lora_adapter": True,
}
"""Whether a call replaces an existing adapter if the body does not say so. vLLM's calls do not;
those that prime-rl and SkyRL add do."""
UNLOADS = ("/v1/unload_lora_adapter", "/unload_lora_adapter")
_NO_LIMIT = 2**31 - 1


class ModelSettings(TypedDict):
    model: str
    dtype: str
    max_model_len: int


class LoraSettings(TypedDict):
    max_lora_rank: int
    max_loras: int


class ParallelSettings(TypedDict):
    data_parallel_size: int
    tensor_parallel_size: int


class ServerSettings(TypedDict):
    """The settings of vLLM that trainers read."""

    model_config: ModelSettings
    lora_config: LoraSettings
    parallel_config: ParallelSettings
    weight_transfer_config: None


class ServerInfo(TypedDict):
    vllm_config: ServerSettings


@dataclass(frozen=True, slots=True, eq=False)
class AliasEndpoints:
    """Endpoints over the registry's own client."""

    caller: Callable[[Request], Awaitable[Caller]]
    client: Callable[[str], RegistryClient]
    """The registry as seen by the holder of an API key ("" without keys)."""
    folders: LoraFolders
    bases: Callable[[], Mapping[str, ServedModel]]

    def routes(self) -> list[Route]:
        loads = [
            Route(path, functools.partial(self.load, in_place=in_place), methods=["POST"])
            for path, in_place in LOADS.items()
        ]
        unloads = [Route(path, self.unload, methods=["POST"]) for path in UNLOADS]
        return [*loads, *unloads, Route("/server_info", self.server_info, methods=["GET"])]

    async def server_info(self, request: Request) -> Response:
        """GET /server_info: the settings of the first base. Raises: Unavailable without one."""
        await self.caller(request)
        base = next(iter(self.bases().values()), None)
        if base is None:
            raise Unavailable("no worker is ready; retry shortly", retry_after_s=1.0)
        return json_response(server_info(base))

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
                try:
                    await registry.get(name)  # raises an error that says which adapters exist
                    raise AdapterNotFound(name)  # It has been published since.
                except AdapterNotFound as error:
                    error.violations = (Violation.of("lora_name", name, error.message),)
                    raise
            if any(version.labels.get(LABEL) != SOURCE for version in found):
                raise PermissionDenied(
                    f"{name!r} has versions that were not loaded here; use `registry delete`"
                )
            await registry.delete(name, every=True, force=True)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def server_info(base: ServedModel) -> ServerInfo:
    """The settings that concern a client. Loaded adapters are not limited in number, and however
    many workers there are, all of them serve an adapter that was loaded once."""
    return {
        "vllm_config": {
            "model_config": {
                "model": base.base_id,
                "dtype": f"torch.{base.dtype}",
                "max_model_len": base.max_model_len,
            },
            "lora_config": {"max_lora_rank": base.max_lora_rank, "max_loras": _NO_LIMIT},
            "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1},
            "weight_transfer_config": None,
        }
    }


def parse_load(fields: dict[str, Any], *, in_place: bool = False) -> tuple[str, str, bool]:
    """Body of a load: name, folder, and whether it may replace what has the name.

    Raises: InvalidRequest, Unsupported.
    """
    body = Body(fields)
    name, folder = _name(body), body.text("lora_path")
    if not folder:
        raise InvalidRequest.field("lora_path", "", "must name a folder in LORAPLEX_LORA_ROOT")
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
