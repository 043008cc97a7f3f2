"""The pages of lists: in order, without gaps, and of a bounded size."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.api import server
from loraplex_services.registry.index.redis_calls import CatalogDown
from tests.registry.conftest import ServedRegistry
from tests.registry.house import upload


async def _raise_down(*args: object, **options: object) -> None:
    raise CatalogDown("away")


@pytest.mark.parametrize("index", ["there", "lost"])
async def test_pages_follow_each_other_without_gap_or_double(
    served: ServedRegistry, tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        await upload(served.client, tmp_path, f"a{seed % 2}", seed)
    if index == "lost":
        monkeypatch.setattr(served.registry.catalog, "page", _raise_down)
    seen: list[tuple[str, int]] = []
    request = pb.ListAdaptersRequest(page_size=2, all_versions=True)
    while True:
        page = await served.client._stub.ListAdapters(request)
        seen += [(version.name, version.version) for version in page.versions]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert seen == [("a0", 1), ("a0", 2), ("a0", 3), ("a1", 1), ("a1", 2)]
    with pytest.raises(InvalidRequest, match="token"):
        request.page_token = "nonsense"
        await served.client._channel.call(served.client._stub.ListAdapters, request)


@pytest.mark.hostile
async def test_a_page_of_versions_with_long_labels_is_shorter(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of them would be larger than the messages that clients receive."""
    monkeypatch.setattr(server, "MAX_PAGE_BYTES", 2000)
    for seed in range(4):
        await upload(
            served.client, tmp_path, "sql", seed, labels={f"{n}": 200 * "x" for n in range(4)}
        )
    request = pb.ListAdaptersRequest(all_versions=True)
    page = await served.client._stub.ListAdapters(request)
    assert [version.version for version in page.versions] == [1]
    listed = served.client.list(name="sql", all_versions=True)
    assert [version.version async for version in listed] == [1, 2, 3, 4]
