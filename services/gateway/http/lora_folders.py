"""Publishes adapters from folders of this machine when a caller loads or names them.

Folders outside the one that the operator allowed cannot be read. All registry calls use the
caller's own key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from loraplex.adapter_format import CONFIG_FILE
from loraplex.api.registry import AdapterVersion
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import InvalidRequest, LoraplexError, NotFound, PermissionDenied, Violation
from loraplex.refs import parse_name, parse_ref
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import (
    MAX_FOLDER_LOADS,
    MAX_FOLDER_LOADS_PER_TENANT,
    SERVICE_KEY_IDS,
)
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.request import with_names

LABEL, SOURCE = "published-by", "load_lora_adapter"
KEPT_VERSIONS = 4
"""Versions of one name that are kept, so that running requests finish with the version they began
with."""


class LoraFolders:
    """The folders below one root. With keys, each tenant has the folder of its name there."""

    def __init__(
        self, client: Callable[[str], RegistryClient], root: Path, resolver: Resolver
    ) -> None:
        """
        Args:
            client: the registry as seen by the holder of an API key ("" without keys).
            root: the folder that adapters may be loaded from.
        """
        self._client = client
        self._root = root.resolve()
        self._resolver = resolver
        self._loads = TenantSlots(MAX_FOLDER_LOADS, max_held=MAX_FOLDER_LOADS_PER_TENANT)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks by tenant and name: the second of two loads of a name waits for the first."""

    async def load(
        self, api_key: str, caller: Caller, name: str, folder: str, *, in_place: bool
    ) -> AdapterVersion:
        """Publish a folder; the same content again is the same version.

        Raises: PermissionDenied, NotFound, InvalidRequest if the name exists and `in_place` is
        False, ResourceExhausted if the tenant has too many loads waiting, or why the registry
        refuses.
        """
        if not _may_publish(caller):  # before anything is read
            raise PermissionDenied("this needs the scope 'publisher'; ask an admin for another key")
        path = await asyncio.to_thread(self._inside, folder, caller)
        adapter = parse_name(name, caller.tenant, field="lora_name")
        publication = Publication(name, labels={LABEL: SOURCE}, keep_versions=KEPT_VERSIONS)
        lock = self._locks.setdefault(adapter, asyncio.Lock())
        loading = self._loads.held(caller.tenant, "adapters to be loaded from a folder")
        async with loading, lock, self._client(api_key) as registry:
            if not in_place and [
                v async for v in registry.list(tenant=adapter[0], name=adapter[1])
            ]:
                raise _already_loaded(name)
            try:
                version = (await registry.upload(path, publication)).version
            except LoraplexError as error:
                raise _without_path(with_names(error, {"name": "lora_name"}), path) from None
        await self._resolver.refresh(version.ref)
        return version

    async def adopted(self, api_key: str, caller: Caller, model: str) -> str:
        """The reference to use for a model string: if it names no adapter but a folder, the folder
        is published first, its path with `--` for each `/`. Raises as `load` does."""
        name, tenant = model.replace("/", "--"), caller.tenant
        if (
            not _may_publish(caller)
            or model in self._resolver.bases()
            or self._is_known(model, tenant)
        ):
            return model
        if not await asyncio.to_thread(self._holds_adapter, model, caller):
            return model
        try:
            if not self._is_known(name, tenant):
                await self.load(api_key, caller, name, model, in_place=False)
        except (NotFound, PermissionDenied):
            return model
        except InvalidRequest as error:
            return name if error.reason == _LOADED else model
        return name

    def _is_known(self, model: str, tenant: str) -> bool:
        try:
            ref = parse_ref(model, tenant)
        except InvalidRequest:
            return False
        return self._resolver.snapshot.find(ref, "") is not None

    def _holds_adapter(self, folder: str, caller: Caller) -> bool:
        try:
            return (self._inside(folder, caller) / CONFIG_FILE).is_file()
        except NotFound:
            return False

    def _inside(self, folder: str, caller: Caller) -> Path:
        """The folder with links resolved. Raises: NotFound unless it is below what the caller may
        publish from."""
        is_operator = caller.key_id in SERVICE_KEY_IDS or "root" in caller.scopes
        root = self._root if is_operator else self._root / caller.tenant
        try:
            path = (root / folder).resolve()
            is_there = bool(folder) and path.is_relative_to(root) and path.is_dir()
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            parent = "LORAPLEX_LORA_ROOT" if is_operator else f"LORAPLEX_LORA_ROOT/{caller.tenant}"
            why = f"there is no such folder in {parent} on the gateway's machine"
            raise NotFound.field("lora_path", "", why)
        return path


def _may_publish(caller: Caller) -> bool:
    is_service = caller.key_id in SERVICE_KEY_IDS
    return is_service or bool(caller.scopes & {"publisher", "admin", "root"})


def _without_path(error: LoraplexError, path: Path) -> LoraplexError:
    """The error without the path of the folder on this machine. Mutates: error."""

    def cut(text: str) -> str:
        return text.replace(f"{path}/", "").replace(str(path), path.name)

    error.message = cut(error.message)
    error.args = (error.message,)
    error.violations = tuple(
        Violation(cut(v.field), cut(v.value), cut(v.description)) for v in error.violations
    )
    return error


_LOADED = "ALREADY_LOADED"


def _already_loaded(name: str) -> InvalidRequest:
    """The error in vLLM's words, by which clients recognise it."""
    why = (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )
    return InvalidRequest.field("lora_name", name, why, reason=_LOADED)
