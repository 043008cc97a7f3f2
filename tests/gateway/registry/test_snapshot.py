"""What a tenant's lists of adapters show, and how many others' adapters they look at."""

from __future__ import annotations

import dataclasses
import random

import pytest

from loraplex.api.registry import Tag, TagTarget
from loraplex.refs import Ref
from loraplex_services.gateway.registry.snapshot import RegistrySnapshot, Version

TENANTS = ("acme", "globex", "initech")


def _version(
    tenant: str, name: str, number: int = 1, *, public: bool = False, shared: str = ""
) -> Version:
    recipients = frozenset({shared} - {""})
    return Version(tenant, name, number, f"sha256:{tenant}{name}{number}", "base",
                   is_public=public, shared_with=recipients)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_lists_show_exactly_what_a_tenant_may_run(seed: int) -> None:
    rng, snapshot = random.Random(seed), RegistrySnapshot()
    kept: dict[tuple[str, str], Version] = {}
    for _ in range(60):
        tenant, name = rng.choice(TENANTS), f"a{rng.randrange(8)}"
        version = _version(
            tenant, name, public=rng.random() < 0.2, shared=rng.choice(("", "", *TENANTS))
        )
        snapshot.put_version(version)
        kept[tenant, name] = version
    for tenant in TENANTS:
        visible = [kept[key] for key in sorted(kept) if kept[key].visible_to(tenant)]
        assert list(snapshot.latest(tenant)) == visible
        perhaps = snapshot.perhaps_visible(tenant)
        assert [key for key in perhaps if snapshot.listing(*key, tenant)] == [
            (version.tenant, version.name) for version in visible
        ]


@pytest.mark.hostile
def test_a_list_looks_at_no_private_adapter_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot, looked_at = RegistrySnapshot(), []
    for number in range(1000):
        snapshot.put_version(_version("globex", f"private-{number}"))
    snapshot.put_version(_version("globex", "public", public=True))
    snapshot.put_version(_version("acme", "own"))
    real = Version.visible_to

    def visible_to(version: Version, tenant: str) -> bool:
        looked_at.append(version.name)
        return real(version, tenant)

    monkeypatch.setattr(Version, "visible_to", visible_to)
    assert [version.name for version in snapshot.latest("acme")] == ["own", "public"]
    assert looked_at == ["own", "public"]


def test_an_adapter_whose_last_version_was_deleted_is_forgotten() -> None:
    snapshot = RegistrySnapshot()
    lasting = _version("acme", "sql")
    snapshot.put_version(lasting)
    for number in range(100):
        name = f"once-{number}"
        version = _version("acme", name, public=number % 2 == 0)
        latest = Tag("acme", name, "latest", (TagTarget(1, version.digest),), 1, 0.0)
        snapshot.put_version(version)
        snapshot.put_tag(latest)
        assert snapshot.find(Ref("acme", name), "") == version
        tombstone = dataclasses.replace(version, deleted=True)
        ended = dataclasses.replace(latest, targets=(), generation=2)
        if number % 3:
            snapshot.put_version(tombstone)
        snapshot.put_tag(ended)
        snapshot.put_version(tombstone)
    assert snapshot.perhaps_visible("acme") == [("acme", "sql")]
    assert snapshot.num_adapters == 1
    again = _version("acme", "once-1", number=2)
    snapshot.put_version(again)
    assert snapshot.version("acme", "once-1", 2) == again


def test_deleted_versions_of_an_adapter_with_others_are_forgotten() -> None:
    """A trainer publishes and retires thousands of updates a day."""
    snapshot = RegistrySnapshot()
    for number in range(1, 101):
        snapshot.put_version(_version("acme", "sql", number=number))
        old = _version("acme", "sql", number=number - 1)
        snapshot.put_version(dataclasses.replace(old, deleted=True))
    assert [*snapshot._entries["acme", "sql"].versions] == [100]
    assert snapshot.version("acme", "sql", 99) is None
