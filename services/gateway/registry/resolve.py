"""Resolves a model string to a served base or to an adapter in the registry.

Answers come from the local snapshot. A reference that is not in it is looked up in the registry
before it counts as missing. While the registry is unavailable, the last snapshot is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from loraplex.api.fields import same_fields
from loraplex.api.registry import Tag
from loraplex.errors import (
    AdapterNotFound,
    InvalidRequest,
    LoraplexError,
    NotFound,
    Unavailable,
    Violation,
)
from loraplex.refs import Ref, parse_ref, why_missing
from loraplex_services.common.limits import MAX_ADAPTERS_PER_REQUEST
from loraplex_services.gateway.registry.snapshot import Adapter, RegistrySnapshot, Version
from loraplex_services.gateway.request import (
    GenerateCall,
    RunningAdapter,
    ServedContent,
    ServedModel,
    Target,
)


class RegistryLookup(Protocol):
    """The part of the registry that resolution needs."""

    async def lookup(
        self, ref: Ref, split_key: str, base_ids: Collection[str]
    ) -> tuple[Version, tuple[Tag, ...]]:
        """The version of a reference; that of a digest is for one of these bases if there is one.
        Raises: NotFound, or Unavailable if the registry cannot be asked."""


class Resolver:
    """Resolves model strings for callers. The registry's watch replaces `snapshot`."""

    def __init__(
        self, registry: RegistryLookup, bases: Callable[[], Mapping[str, ServedModel]]
    ) -> None:
        self._registry = registry
        self.bases = bases
        """Returns the served bases by id."""
        self.snapshot = RegistrySnapshot()
        self.on_moves: Callable[[Collection[Adapter] | None], None] = lambda adapters: None
        """Called after tags moved, with their adapters; None = any may have moved."""
        self.on_versions: Callable[[Sequence[Version]], None] = lambda versions: None
        """Called with versions that were just published, before their tags move."""

    async def target(self, call: GenerateCall) -> Target:
        """The base and adapters of a call. Raises: NotFound, InvalidRequest, Unavailable."""
        if not call.model:
            raise InvalidRequest.field("model", "", "name a base or an adapter")
        bases = self.bases()
        if not bases:
            # After a start, for example: while the served bases are unknown, no model is missing.
            raise Unavailable(
                "no worker is ready; retry shortly", retry_after_s=1.0, reason="NO_READY_WORKER"
            )
        if call.model in bases:
            return await self._on_base(call)
        if call.adapters:
            raise InvalidRequest.field(
                "adapters", call.model, "with adapters, model must be the id of a served base"
            )
        base_id, _, name = call.model.rpartition(":")
        if base_id in bases:
            # SGLang's clients name adapters in this way.
            why = f"{base_id} is a base; name an adapter of it without the base, as {name!r}"
            raise AdapterNotFound(call.model, why)
        version = await self._version(call.model, call, "model", bases)
        return Target(version.base_id, (_running(version, 1.0),))

    def models(self, tenant: str) -> Iterator[ServedModel | Version]:
        """Bases first, then own adapters by name, then those of others."""
        bases = self.bases()
        yield from bases.values()
        visible = [v for v in self.snapshot.latest(tenant) if _fits(v, bases.get(v.base_id))]
        yield from (v for v in visible if v.tenant == tenant)
        yield from (v for v in visible if v.tenant != tenant)

    async def model(
        self, model: str, tenant: str, field: str = "model", *, runs_all: bool = False
    ) -> ServedModel | Version:
        """A base or an adapter of a served one; `field` names it in errors. Raises: NotFound."""
        base = self.bases().get(model)
        if base is not None:
            return base
        viewer = None if runs_all else tenant
        ref = parse_ref(model, tenant, field=field)
        version = await self._find(ref, viewer, "", self.bases())
        self._check_served(version, model)
        return version

    async def refresh(self, ref: str) -> None:
        """Read from the registry what a reference means now, for the next request.

        Raises: Unavailable.
        """
        await self._ask(parse_ref(ref), "", self.bases())

    async def _on_base(self, call: GenerateCall) -> Target:
        if (num_adapters := len(call.adapters)) > MAX_ADAPTERS_PER_REQUEST:
            description = f"at most {MAX_ADAPTERS_PER_REQUEST} adapters in one request"
            raise InvalidRequest.field("adapters", num_adapters, description)
        running = []
        for index, requested in enumerate(call.adapters):
            field = f"adapters[{index}].ref"
            version = await self._version(requested.ref, call, field, {call.model})
            if version.base_id != call.model:
                raise InvalidRequest.field(
                    field, requested.ref, f"it was made for {version.base_id!r}, not {call.model!r}"
                )
            running.append(_running(version, _weight(requested.weight, index)))
        return Target(call.model, _merged(running))

    async def _version(
        self, text: str, call: GenerateCall, field: str, base_ids: Collection[str]
    ) -> Version:
        ref = parse_ref(text, call.tenant, field=field)
        try:
            version = await self._find(ref, call.viewer, call.split_key, base_ids)
            self._check_served(version, text)
        except AdapterNotFound as error:
            error.violations = (Violation.of(field, text, error.hint),)
            raise
        return version

    def _check_served(self, version: Version, text: str) -> None:
        base = self.bases().get(version.base_id)
        if base is None:
            raise AdapterNotFound(text, f"its base {version.base_id!r} is not served here")
        if not _fits(version, base):
            why = f"it was published for another base that was called {version.base_id!r}"
            raise AdapterNotFound(text, why)

    async def _find(
        self, ref: Ref, viewer: str | None, split_key: str, base_ids: Collection[str]
    ) -> Version:
        """Find a version; other tenants' private adapters look exactly like missing ones."""
        version = self.snapshot.find(ref, split_key, base_ids)
        if version is None or not version.visible_to(viewer):
            # The registry is asked in both cases: the time of a refusal must not tell whether
            # another tenant has a private adapter of this name.
            version = await self._ask(ref, split_key, base_ids)
        if version is None or not version.visible_to(viewer):
            raise self.missing(ref, viewer)
        return version

    def missing(self, ref: Ref, viewer: str | None) -> AdapterNotFound:
        """The error that says what is missing, and which versions and tags exist."""
        listing = self.snapshot.listing(ref.tenant, ref.name, viewer)
        if listing is None:
            why = why_missing(ref, (), ())
            if viewer not in (None, ref.tenant):
                why += f". One of {ref.tenant} must be public or shared with {viewer}"
            return AdapterNotFound(str(ref), why)
        shown = replace(ref, name=listing.name)
        versions = [version.number for version in listing.versions]
        tags = [tag.tag for tag in listing.tags]
        return AdapterNotFound(str(shown), why_missing(shown, versions, tags))

    async def _ask(self, ref: Ref, split_key: str, base_ids: Collection[str]) -> Version | None:
        """Ask the registry and remember its answer. Mutates: snapshot."""
        snapshot, began = self.snapshot, self.snapshot.num_changes
        try:
            version, tags = await self._registry.lookup(ref, split_key, base_ids)
        except NotFound:
            return None
        except LoraplexError as error:
            raise Unavailable(
                f"{ref} is not in the last snapshot, and the registry is unavailable "
                f"({error.reason}); retry shortly",
                reason="REGISTRY_UNAVAILABLE",
                retry_after_s=1.0,
            ) from error
        snapshot.put_found(version, tags, began)  # A snapshot that replaced it may be newer.
        self.on_moves({(version.tenant, version.name.lower())})
        return self.snapshot.find(ref, split_key, base_ids) or version


def _fits(version: Version, base: ServedModel | None) -> bool:
    """True if the adapter's base is served with the geometry that the adapter was checked for."""
    if base is None:
        return False
    both_known = version.base_fingerprint and base.fingerprint
    return not both_known or version.base_fingerprint == base.fingerprint


def _running(version: Version, weight: float) -> RunningAdapter:
    facts = same_fields(version, ServedContent)
    return RunningAdapter(version.label, version.digest, weight, **facts)


def _weight(weight: float | None, index: int) -> float:
    if weight is None:
        return 1.0
    if not math.isfinite(weight) or abs(weight) > 1000:
        raise InvalidRequest.field(
            f"adapters[{index}].weight", weight, "must be a number from -1000 to 1000"
        )
    return weight


def _merged(running: list[RunningAdapter]) -> tuple[RunningAdapter, ...]:
    """Sorted by digest; one named twice counts with both weights."""
    by_digest: dict[str, RunningAdapter] = {}
    for one in running:
        known = by_digest.get(one.digest)
        weight = one.weight + (known.weight if known else 0.0)
        by_digest[one.digest] = replace(one, weight=weight)
    return tuple(by_digest[digest] for digest in sorted(by_digest))


def model_id(model: ServedModel | Version, tenant: str) -> str:
    """The value of `model` for an adapter: own adapters by bare name, others' as tenant/name."""
    if isinstance(model, ServedModel):
        return model.base_id
    return model.name if model.tenant == tenant else f"{model.tenant}/{model.name}"
