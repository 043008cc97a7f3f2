"""References by digest, where the same content is there more than once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.errors import InvalidRequest
from loraplex.refs import Ref
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.callers import note_read
from loraplex_services.registry.access.permissions import EVERYTHING
from tests.registry.conftest import ServedRegistry
from tests.registry.house import adapter_files, opened, publish, tiny_base, upload

TWIN = "example/twin"


async def _for_both_bases(served: ServedRegistry) -> str:
    """v1 and v3 for the first base, which differ in their README, and v2 for the other. Returns
    their digest."""
    await served.registry.bases.register(tiny_base(TWIN), replace=False)
    first = await publish(served.registry, "sql", 1, base_id="example/tiny")
    await publish(served.registry, "sql", 1, base_id=TWIN)
    files = {**adapter_files(1), "README.md": b"# What it does"}
    session = await opened(served.registry, "sql", files, base_id="example/tiny")
    await served.registry.publisher.finish(session)
    return first.version.digest


async def test_a_digest_keeps_the_base_that_it_was_published_for_first(
    served: ServedRegistry,
) -> None:
    ref = f"sql@{await _for_both_bases(served)}"
    for number in (3, 1, 2):
        found = (await served.client.get(ref)).version
        assert (found.version, found.base_id) == (number, TWIN if number == 2 else "example/tiny")
        await served.registry.indexer.rebuild()
        assert (await served.client.get(ref)).version.version == number
        await served.client.delete(f"sql:v{number}")


async def test_a_digest_is_for_the_base_that_a_gateway_serves(served: ServedRegistry) -> None:
    request = pb.GetAdapterRequest(ref=f"sql@{await _for_both_bases(served)}")
    for base_id, number in ((TWIN, 2), ("example/tiny", 3), ("example/other", 3)):
        request.base_ids[:] = [base_id]
        found = await served.client._channel.call(served.client._stub.GetAdapter, request)
        assert found.version.version == number


async def test_a_look_up_by_digest_reads_one_version_unless_several_have_had_it(
    served: ServedRegistry,
) -> None:
    num_read: list[int] = []
    note_read.set(num_read.append)
    digests = [
        (await publish(served.registry, "sql", seed, latest=False)).version.digest
        for seed in (1, 2, 3)
    ]
    ref = Ref("default", "sql", digest=digests[1])
    await served.registry.lookup.resolve(ref, EVERYTHING)
    assert num_read.pop() == 1
    await served.registry.bases.register(tiny_base(TWIN), replace=False)
    await publish(served.registry, "sql", 2, latest=False, base_id=TWIN)
    await served.registry.lookup.resolve(ref, EVERYTHING)
    assert num_read.pop() == 4


def _attach(client: RegistryClient, digest: str) -> Awaitable[Any]:
    request = pb.AttachSignatureRequest(ref=f"sql@{digest}")
    return client._channel.call(client._stub.AttachSignature, request)


@pytest.mark.parametrize(
    "call",
    [
        lambda client, digest: client.set_tag("sql", "prod", {digest: 1}),
        lambda client, digest: client.delete(f"sql@{digest}"),
        _attach,
    ],
)
async def test_a_change_of_a_digest_that_is_there_for_several_bases_has_to_name_a_version(
    served: ServedRegistry, call: Callable[[RegistryClient, str], Awaitable[Any]]
) -> None:
    digest = await _for_both_bases(served)
    with pytest.raises(InvalidRequest) as refused:
        await call(served.client, digest)
    assert "(v3 for example/tiny, v2 for example/twin); name a version" in refused.value.message
    assert refused.value.reason == "AMBIGUOUS_DIGEST"
    assert not await _tagged(served.client, "prod")


async def test_a_digest_that_is_there_for_one_base_is_tagged_and_deleted_by_itself(
    served: ServedRegistry, tmp_path: Path
) -> None:
    await upload(served.client, tmp_path, "sql", 1)
    digest = (await served.client.get("sql")).version.digest
    tag = await served.client.set_tag("sql", "prod", {digest: 1})
    assert [target.version for target in tag.targets] == [1]
    [deleted] = await served.client.delete(f"sql@{digest}", force=True)
    assert deleted.version == 1


async def _tagged(client: RegistryClient, tag: str) -> bool:
    return any(each.tag == tag for each in (await client.get("sql:v1")).tags)
