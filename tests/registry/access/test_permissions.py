"""Rights of one caller over tenants."""

from __future__ import annotations

import contextvars

import pytest

from loraplex.errors import AdapterNotFound, PermissionDenied
from loraplex_services.common.callers import LOCAL, ROOT, Caller, current_caller
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api.convert import move_to_proto, version_to_proto
from loraplex_services.registry.records import SHARED, AdapterRecord, Move, VersionRecord


def _access(*scopes: str) -> Access:
    return Access.of(Caller("acme", "k1", frozenset(scopes)))


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


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("caller", "creator", "recipients"),
    [
        (Caller("acme", "k1", frozenset({"reader"})), "k-of-acme", ["globex", "initech"]),
        (Caller("globex", "k2", frozenset({"admin"})), "", ["globex"]),
        (Caller("other", "k3", frozenset({"reader"})), "", []),
        (Caller("default", "service", frozenset({"service"})), "k-of-acme", ["globex", "initech"]),
    ],
)
def test_recipients_of_an_adapter_learn_neither_of_each_other_nor_who_published_it(
    caller: Caller, creator: str, recipients: list[str]
) -> None:
    adapter = AdapterRecord("acme", "upper", SHARED, ("globex", "initech"))
    record = VersionRecord("acme", "upper", 1, "sha256:00", "base", created_s=0.0, files=(),
                           base_fingerprint="", creator="k-of-acme")  # fmt: skip
    move = Move(1, (), 0.0, "k-of-acme", "id")
    context = contextvars.copy_context()
    context.run(current_caller.set, caller)
    shown = context.run(version_to_proto, record, adapter)
    assert (shown.creator, list(shown.shared_with)) == (creator, recipients)
    assert context.run(move_to_proto, move, "acme", "upper").mover == creator
