"""Permissions of callers on adapters."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.errors import AdapterNotFound, PermissionDenied
from loraplex_services.common.callers import ROOT, Caller
from loraplex_services.registry.records import PUBLIC, SHARED, AdapterRecord

SERVICE = "service"
"""Scope of gateways and workers, which read on behalf of all tenants."""

_IMPLIED = {"reader": 0, "publisher": 1, "admin": 2}


@dataclass(frozen=True, slots=True)
class Access:
    """The permissions of one caller."""

    tenant: str
    actor: str
    scopes: frozenset[str]

    @classmethod
    def of(cls, caller: Caller) -> Access:
        """The permissions of a caller; without auth a caller on this machine has all of them."""
        scopes = caller.scopes if caller.key_id else caller.scopes | {ROOT}
        return cls(caller.tenant, caller.key_id, scopes)

    @property
    def is_root(self) -> bool:
        return ROOT in self.scopes

    @property
    def sees_all(self) -> bool:
        return self.is_root or SERVICE in self.scopes

    def owns(self, tenant: str) -> bool:
        """Whether the caller may see what only a tenant itself sees, such as whose key published
        an adapter."""
        return self.sees_all or tenant == self.tenant

    def may_see(self, tenant: str, adapter: AdapterRecord | None) -> bool:
        """Own adapters, public ones, and those shared with this tenant."""
        if self.owns(tenant):
            return True
        if adapter is None:
            return False
        shared = adapter.visibility == SHARED and self.tenant in adapter.shared_with
        return adapter.visibility == PUBLIC or shared

    def require_pull(self, tenant: str, adapter: AdapterRecord | None) -> None:
        """Running and pulling are separate grants. Raises PermissionDenied."""
        granted = adapter is not None and adapter.pullable
        if not (self.owns(tenant) or granted):
            raise PermissionDenied(
                "you may run this adapter but not download it; ask its owner for pullable sharing"
            )

    def require_publishing(self, tenant: str) -> None:
        """Require the right to publish for a tenant. Unlike `require` it names the other
        tenant, because the answer does not reveal what that tenant has. Raises PermissionDenied."""
        if tenant != self.tenant and not self.is_root:
            raise PermissionDenied(
                f"a key of tenant {self.tenant!r} cannot publish for {tenant!r}; use its own"
            )
        self.require("publisher")

    def require(self, scope: str, tenant: str | None = None) -> None:
        """Require `reader`, `publisher` or `admin` rights, over `tenant` if one is given.

        Raises:
            PermissionDenied: the scope is missing, or another tenant would be administered.
            AdapterNotFound: it is another tenant; whether that has the adapter is not revealed.
        """
        if self.is_root:
            return
        if not any(_IMPLIED.get(held, -1) >= _IMPLIED[scope] for held in self.scopes):
            raise PermissionDenied(f"this needs the scope {scope!r}; ask an admin for another key")
        if tenant is not None and tenant != self.tenant:
            if scope == "admin":
                raise PermissionDenied(
                    f"a key of tenant {self.tenant!r} cannot administer {tenant!r}; use its own"
                )
            raise AdapterNotFound(
                f"{tenant}/...",
                f"a key of tenant {self.tenant!r} cannot do this for {tenant!r}; use its own",
            )

    def require_root(self) -> None:
        """Require rights over the whole registry."""
        if not self.is_root:
            raise PermissionDenied("this affects all tenants and needs the first admin key")

    def require_service_or_root(self) -> None:
        """Require the identity of a service, or the first admin key."""
        if SERVICE not in self.scopes:
            self.require_root()


EVERYTHING = Access("", "", frozenset({ROOT}))
"""The permissions of the registry itself."""
