"""What a tenant's lists of adapters show, and how many others' adapters they look at."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loraplex.api.registry import Tag, TagTarget
from loraplex.refs import Ref
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.registry.convert import version_from_wire
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
        tombstone = replace(version, deleted=True)
        ended = replace(latest, targets=(), generation=2)
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
        snapshot.put_version(replace(old, deleted=True))
    assert [*snapshot._entries["acme", "sql"].versions] == [100]
    assert snapshot.version("acme", "sql", 99) is None


def test_versions_of_an_adapter_keep_one_list_of_its_recipients() -> None:
    """1,000 names for each of 10,000 versions have 1 GB."""
    snapshot = RegistrySnapshot()
    for number in (1, 2):
        names = frozenset({"globex", "initech"})
        snapshot.put_version(replace(_version("acme", "sql", number), shared_with=names))
    first, second = (snapshot.version("acme", "sql", number) for number in (1, 2))
    assert first is not None and second is not None
    assert first.shared_with is second.shared_with
    snapshot.put_version(replace(second, shared_with=frozenset({"globex"})))
    assert first.shared_with == {"globex", "initech"}
    changed = snapshot.version("acme", "sql", 2)
    assert changed is not None and changed.shared_with == {"globex"}


def test_a_gateway_keeps_a_bounded_part_of_the_labels_of_a_version() -> None:
    labels = {f"k{number:02}": 256 * "x" for number in range(64)}
    message = registry_pb2.AdapterVersion(tenant="acme", name="sql", version=1, labels=labels)
    kept = version_from_wire(message).labels
    assert [key for key, _ in kept] == sorted(labels)[:16]
    assert {value for _, value in kept} == {64 * "x"}
