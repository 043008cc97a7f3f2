"""Rights of one caller over tenants."""

from __future__ import annotations

import pytest

from loraplex.errors import AdapterNotFound, PermissionDenied
from loraplex_services.common.callers import LOCAL, Caller
from loraplex_services.registry.access.permissions import ROOT, Access


def _access(*scopes: str, tenant: str = "acme") -> Access:
    return Access.of(Caller(tenant, "k1", frozenset(scopes)))


def test_publishing_for_another_tenant_is_a_missing_right() -> None:
    _access("publisher").require_publishing("acme")
    with pytest.raises(PermissionDenied, match="tenant 'acme' cannot publish for 'other'"):
        _access("admin").require_publishing("other")
    with pytest.raises(PermissionDenied, match="scope 'publisher'"):
        _access("reader").require_publishing("acme")


def test_changing_what_another_tenant_has_tells_nothing_of_it() -> None:
    with pytest.raises(AdapterNotFound):
        _access("admin").require("publisher", "other")


def test_administering_another_tenant_is_a_missing_right() -> None:
    _access("admin").require("admin", "acme")
    with pytest.raises(PermissionDenied, match="tenant 'acme' cannot administer 'other'"):
        _access("admin").require("admin", "other")


@pytest.mark.parametrize("access", [_access(ROOT), Access.of(LOCAL)])
def test_the_first_key_and_callers_without_auth_may_act_for_all(access: Access) -> None:
    access.require_publishing("other")
    access.require("admin", "other")
