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
