"""The adapters in the console: pages of the list, one adapter with its history, and changes to it.

The list comes from the gateway's own copy of the registry. One adapter is read from the registry,
and changed there, with the caller's own key.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.api.load import ModelLoad
from loraplex.api.registry import Tag, TagTarget
from loraplex.api.residency import Tier
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex.refs import LATEST, Ref, parse_name
from loraplex_services.common.callers import Caller
from loraplex_services.common.units import parse_digits
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.http.guard import api_key_of
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.pipeline.history import LoadHistory
from loraplex_services.gateway.registry.keyring import sees_all_adapters
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.snapshot import Listing, Version
from loraplex_services.gateway.workers.fleet import Fleet

PAGE_SIZE = 50
MAX_VERSIONS = 50
"""Versions of one adapter that a page shows."""
MAX_MOVES = 10
"""Moves of each tag that a page shows."""
_LISTED_AT_ONCE = 500
"""Number of adapters that are processed before the event loop runs other work."""
NO_STORE = {"cache-control": "no-store"}

Devices = Mapping[str, int]
"""How many workers hold a digest on their device."""

_SORTS: Mapping[str, Callable[[Listing, Mapping[str, int]], Any]] = {
    "name": lambda listing, requests: (listing.tenant, listing.name.lower()),
    "created": lambda listing, requests: -listing.versions[0].created_unix_s,
    "versions": lambda listing, requests: -len(listing.versions),
    "rank": lambda listing, requests: -listing.versions[0].max_rank,
    "requests": lambda listing, requests: -requests.get(_full_name(listing), 0),
}


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterQuery:
    """The adapters that a page shows, and their order."""

    search: str = ""
    """Part of a name, a tenant, a tag or a label as key=value."""
    base: str = ""
    tag: str = ""
    resident: bool = False
    """Only those that a worker holds on its device."""
    sort: str = "name"
    page: int = 1

    def keeps(self, listing: Listing, devices: Devices) -> bool:
        """True if the list contains an adapter."""
        tags = [tag.tag for tag in listing.tags]
        needle = self.search.strip().lower()
        texts = (_full_name(listing), *tags, *_labels(listing.versions[0]))
        return (
            (not needle or any(needle in text.lower() for text in texts))
            and self.base in ("", listing.versions[0].base_id)
            and (not self.tag or self.tag in tags)
            and not (self.resident and not any(v.digest in devices for v in listing.versions))
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterEndpoints:
    """Endpoints of the list and of one adapter."""

    caller: Callable[[Request], Awaitable[Caller]]
    resolver: Resolver
    fleet: Fleet
    registry: Callable[[str], RegistryClient]
    """The registry as seen by the holder of an API key ("" without keys)."""
    loads: LoadHistory

    def routes(self) -> list[Route]:
        return [
            Route("/console/adapters", self.adapters, methods=["GET"]),
            Route("/console/adapter", self.adapter, methods=["GET"]),
            Route("/console/adapter", self.change, methods=["POST"]),
        ]

    async def adapters(self, request: Request) -> Response:
        """A page of the adapters that the caller may run."""
        caller = await self.caller(request)
        query = query_of(request.query_params)
        devices = self._devices()
        requests = {model: load.requests for model, load in self._recent(caller).items()}
        kept: list[Listing] = []
        names = self.resolver.snapshot.perhaps_visible(caller.tenant)
        for index, adapter in enumerate(names):
            if index % _LISTED_AT_ONCE == _LISTED_AT_ONCE - 1:
                await asyncio.sleep(0)
            listing = self.resolver.snapshot.listing(*adapter, caller.tenant)
            if listing is not None and query.keeps(listing, devices):
                kept.append(listing)
        kept.sort(key=lambda listing: _SORTS[query.sort](listing, requests))
        shown = kept[(query.page - 1) * PAGE_SIZE : query.page * PAGE_SIZE]
        body = {
            "adapters": [_row(each, devices, requests) for each in shown],
            "total": len(kept),
            "page": query.page,
            "num_pages": max(1, -(-len(kept) // PAGE_SIZE)),
            "bases": list(self.resolver.bases()),
        }
        return json_response(body, NO_STORE)

    async def adapter(self, request: Request) -> Response:
        """One adapter: what the gateway knows, and what the registry adds."""
        caller = await self.caller(request)
        name = request.query_params.get("name", "")
        tenant, short = parse_name(name, caller.tenant, field="name")
        listing = self.resolver.snapshot.listing(tenant, short.lower(), caller.tenant)
        if listing is None:
            raise self.resolver.missing(Ref(tenant, short, tag=LATEST), caller.tenant)
        devices = self._devices()
        last_minute = self._recent(caller).get(_full_name(listing))
        body = _row(listing, devices, {}) | {
            "versions": [_version(v, devices) for v in listing.versions[:MAX_VERSIONS]],
            "num_versions": len(listing.versions),
            "last_minute": dataclasses.asdict(last_minute) if last_minute else None,
            "may_change": tenant == caller.tenant
            and bool(not caller.key_id or caller.scopes & {"admin", "publisher", "root"}),
            "problem": "",
        }
        try:
            body |= await self._in_registry(api_key_of(request), listing, body["versions"])
        except LoraplexError as error:
            body["problem"] = error.message
        return json_response(body, NO_STORE)

    async def change(self, request: Request) -> Response:
        """Move, split or roll back a tag, or delete a version, with the caller's key."""
        caller = await self.caller(request)
        body = Body(await read_json(request, caller))
        name, action = body.text("name") or "", body.text("action") or ""
        tenant, short = parse_name(name, caller.tenant, field="name")
        name = f"{tenant}/{short}"
        tag, version = body.text("tag") or "", body.integer("version") or 0
        targets = _targets(body.raw("targets"))
        description = body.text("description")
        body.finish()
        async with self.registry(api_key_of(request)) as registry:
            match action:
                case "tag":
                    await registry.set_tag(name, tag, targets)
                case "rollback":
                    await registry.rollback(name, tag, version)
                case "describe":
                    await registry.describe(name, description)
                case "delete":
                    await registry.delete(f"{name}:v{version}")
                case _:
                    known = "must be tag, rollback, describe or delete"
                    raise Unsupported.field("action", action[:32], known)
        return json_response({"done": action}, NO_STORE)

    async def _in_registry(
        self, api_key: str, listing: Listing, versions: Iterable[dict[str, Any]]
    ) -> dict[str, Any]:
        """Facts that only the registry knows: size, creator, labels, parent, the tags' history, and
        what the caller's tenant used within 30 days."""
        name = _full_name(listing)
        facts = {}
        async with self.registry(api_key) as registry:
            async for version in registry.list(
                tenant=listing.tenant, name=listing.name, all_versions=True
            ):
                facts[version.version] = {
                    "size_bytes": version.size_bytes,
                    "creator": version.creator,
                    "labels": dict(version.labels),
                    "description": version.description,
                    "adapter_labels": dict(version.adapter_labels),
                    "parent": version.parent,
                    "visibility": version.visibility,
                    "warnings": [each.description for each in version.warnings],
                }
            history = {
                tag.tag: [
                    {
                        "at_unix_s": move.moved_unix_s,
                        "by": move.mover,
                        "targets": _weighted(move.targets),
                    }
                    for move in (await registry.tag_history(name, tag.tag))[:MAX_MOVES]
                ]
                for tag in listing.tags
            }
            days = await registry.usage(model=name)
        return {
            "usage": {
                "requests": sum(day.requests for day in days),
                "errors": sum(day.errors for day in days),
                "generated_tokens": sum(day.generated_tokens for day in days),
                "last_day": max((day.day for day in days), default=""),
            },
            "versions": [each | facts.get(each["number"], {}) for each in versions],
            "history": history,
        }

    def _recent(self, caller: Caller) -> Mapping[str, ModelLoad]:
        """The usage of the adapters of the caller's tenant within the last minute, by tenant/name.
        Only their owners see that of other adapters."""
        recent = self.loads.last_minute(None if sees_all_adapters(caller) else caller.tenant)
        return {each.model: each for each in recent.models}

    def _devices(self) -> Devices:
        return Counter(
            residency.digest
            for view in self.fleet.views()
            for residency in view.adapters.values()
            if residency.tier is Tier.DEVICE
        )


def query_of(parameters: Mapping[str, str]) -> AdapterQuery:
    """The query of an address. Raises: InvalidRequest."""
    sort, page = parameters.get("sort", "name"), parameters.get("page", "1")
    if sort not in _SORTS:
        raise InvalidRequest.field("sort", sort[:32], f"must be one of {', '.join(_SORTS)}")
    number = parse_digits(page)
    if number is None or not 1 <= number <= 1_000_000:
        raise InvalidRequest.field("page", page[:32], "must be an integer from 1")
    return AdapterQuery(
        parameters.get("search", ""),
        parameters.get("base", ""),
        parameters.get("tag", ""),
        parameters.get("resident", "") == "true",
        sort,
        number,
    )


def _targets(value: Any) -> dict[int, int]:
    """Weights by version. Raises: InvalidRequest."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_type("targets", value, "an object from version to weight")
    for version, weight in value.items():
        is_weight = isinstance(weight, int) and not isinstance(weight, bool)
        if parse_digits(version) is None or not is_weight:
            raise InvalidRequest.field("targets", version[:32], "must be an object such as {3: 90}")
    return {int(version): weight for version, weight in value.items()}


def _full_name(listing: Listing) -> str:
    return f"{listing.tenant}/{listing.name}"


def _row(listing: Listing, devices: Devices, requests: Mapping[str, int]) -> dict[str, Any]:
    """One adapter of the list, with its newest versions."""
    return {
        "tenant": listing.tenant,
        "name": listing.name,
        "versions": [_version(version, devices) for version in listing.versions[:3]],
        "num_versions": len(listing.versions),
        "requests": requests.get(_full_name(listing), 0),
        "num_workers": max(devices.get(version.digest, 0) for version in listing.versions),
        "tags": [_tag(tag) for tag in listing.tags],
        "labels": _labels(listing.versions[0]),
    }


def _version(version: Version, devices: Devices) -> dict[str, Any]:
    return {
        "number": version.number,
        "digest": version.digest,
        "base": version.base_id,
        "rank": version.max_rank,
        "created_unix_s": version.created_unix_s,
        "public": version.is_public,
        "num_workers": devices.get(version.digest, 0),
    }


def _labels(version: Version) -> list[str]:
    return [f"{key}={value}" for key, value in version.labels]


def _tag(tag: Tag) -> dict[str, Any]:
    return {"tag": tag.tag, "targets": _weighted(tag.targets), "pending": _weighted(tag.pending)}


def _weighted(targets: Iterable[TagTarget]) -> list[dict[str, int]]:
    return [{"number": target.version, "weight": target.weight} for target in targets]
