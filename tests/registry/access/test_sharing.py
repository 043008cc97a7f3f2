"""Who may use an adapter."""

from __future__ import annotations

from loraplex_services.registry.access.sharing import SharingChange
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.records import PRIVATE, PUBLIC
from tests.registry.house import publish


async def test_a_publication_that_says_who_may_use_an_adapter_changes_it_as_sharing_does(
    registry: Registry,
) -> None:
    await publish(registry, "sql", 1)
    await registry.sharing.set("default", "sql", SharingChange(PUBLIC, pullable=True), "me")
    private = await publish(registry, "sql", 2, visibility=PRIVATE)
    public = await publish(registry, "sql", 3, visibility=PUBLIC)
    for done, visibility in ((private, PRIVATE), (public, PUBLIC)):
        assert done.adapter is not None
        assert (done.adapter.visibility, done.adapter.pullable) == (visibility, False)
    [entry, *_], _ = await registry.audit.page("default", 100)
    assert (entry.action, entry.details["visibility"]) == ("version.publish", "public")
    found = await registry.catalog.find("default/sql", "all")
    assert found.adapter == public.adapter


async def test_looking_at_sharing_and_description_is_not_in_the_audit_log(
    registry: Registry,
) -> None:
    await publish(registry, "sql", 1)
    await registry.sharing.set("default", "sql", SharingChange(PUBLIC), "me")
    await registry.sharing.describe("default", "sql", "Answers in SQL.", {}, (), "me")
    seen = await registry.sharing.set("default", "sql", SharingChange(0), "me")
    assert await registry.sharing.describe("default", "sql", None, {}, (), "me") == seen
    assert (seen.visibility, seen.description) == (PUBLIC, "Answers in SQL.")
    entries, _ = await registry.audit.page("default", 100)
    actions = [entry.action for entry in entries]
    assert actions == ["adapter.describe", "adapter.share", "version.publish"]
