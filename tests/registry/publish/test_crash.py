"""The registry dies at every step of publishing. Afterwards: the old state or the new, no third.

Real processes, really ended; the next one starts on what is left.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.client import uploading
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError
from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.registry import layout
from loraplex_services.registry.maintenance.gc import Collector
from loraplex_services.registry.publish.failpoint import EXIT_CODE
from tests.registry.house import ANY_AGE_S, adapter_files, orphans_of, register_base, write_folder
from tests.registry.process import RegistryProcess

STEPS = [
    "upload.session",
    "upload.part",
    "upload.part:2",
    "publish.inspected",
    "publish.pending",
    "publish.blob",
    "publish.blob:2",
    "publish.manifest",
    "publish.intent",
    "publish.version",
    "publish.visibility",
    "publish.tag",
    "publish.tag:2",
    "publish.audit",
    "publish.index",
    "publish.finished",
]
SENDING = ("upload.session", "upload.part", "upload.part:2")
"""Steps that an upload in one call does not have."""
INVISIBLE = set(STEPS[: STEPS.index("publish.intent") + 1])
"""Steps at which nothing may have become visible."""

NUM_KILLS = 6
"""Times of the test that kills a registry at random moments; the first one daily."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
async def process(tmp_path: Path, objects_url: str) -> AsyncIterator[RegistryProcess]:
    registry = RegistryProcess(tmp_path / "state", LORAPLEX_OBJECTS=objects_url)
    yield registry
    await registry.kill()


async def _state(client: RegistryClient) -> dict[str, int]:
    """Newest version of the list, and what the tags mean."""
    versions = [v.version async for v in client.list(name="sql", all_versions=True)]
    assert versions == list(range(1, len(versions) + 1))
    tags = {tag: (await client.get(f"sql:{tag}")).version.version for tag in ("latest", "prod")}
    for version in versions:
        assert (await client.get(f"sql:v{version}")).version.version == version
    return {"newest": max(versions), **tags}


DAILY = {
    ("publish.blob:2", "embedded", "in parts"),
    ("publish.version", "surviving", "in one call"),
    ("publish.index", "surviving", "in parts"),
}
CASES = [
    pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.long])
    for case in itertools.product(STEPS, ("embedded", "surviving"), ("in parts", "in one call"))
    if case[0] not in SENDING or case[2] == "in parts"
]
"""Every step with a metadata server that dies too and one that survives, of an upload in parts and
of one in one call; a few of them daily."""


@pytest.mark.parametrize(("step", "metadata", "way"), CASES)
async def test_a_crash_leaves_the_old_state_or_the_new_one(
    process: RegistryProcess,
    objects_url: str,
    tmp_path: Path,
    step: str,
    metadata: str,
    way: str,
    metadata_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "in parts":
        monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    shared = {} if metadata == "embedded" else {"LORAPLEX_METADATA": metadata_url}
    folders = [
        write_folder(tmp_path / str(seed), adapter_files(seed, lora_alpha=seed)) for seed in (1, 2)
    ]
    publication = Publication("sql", tags=["prod"])
    await process.start(**shared, LORAPLEX_DEBUG=f"failpoint={_second(step)}")
    async with RegistryClient(process.address, Credentials()) as client:
        await register_base(client)
        await client.upload(folders[0], publication)
        with pytest.raises(LoraplexError):
            await client.upload(folders[1], publication)
    assert await process.wait() == EXIT_CODE

    await process.start(**shared)
    async with RegistryClient(process.address, Credentials()) as client:
        state = await _state(client)
        new = {"newest": 2, "latest": 2, "prod": 2}
        if step in INVISIBLE:
            assert state == {"newest": 1, "latest": 1, "prod": 1}
        else:
            assert state == new
        done = await client.upload(folders[1], publication)
        assert done.version.version == 2
        assert await _state(client) == new
    await process.kill()
    await _check_no_orphans(objects_url)


@pytest.mark.parametrize(
    ("seed", "metadata"),
    [
        pytest.param(seed, kind, marks=[] if seed == 0 else [pytest.mark.long])
        for seed in range(NUM_KILLS)
        for kind in ("embedded", "surviving")
        if seed or kind == "surviving"
    ],
)
async def test_a_kill_at_any_time_loses_nothing_that_was_acknowledged(
    process: RegistryProcess,
    objects_url: str,
    metadata_url: str,
    tmp_path: Path,
    seed: int,
    metadata: str,
) -> None:
    """Several trainers publish to two adapters, and the registry is killed, three times in turn."""
    shared = {} if metadata == "embedded" else {"LORAPLEX_METADATA": metadata_url}
    chance, seeds = random.Random(seed), itertools.count(1)
    acknowledged: dict[str, dict[int, str]] = defaultdict(dict)

    def num_acknowledged() -> int:
        return sum(map(len, acknowledged.values()))

    async def train(client: RegistryClient, name: str) -> None:
        for number in seeds:
            files = adapter_files(number, lora_alpha=number)
            folder = write_folder(tmp_path / str(number), files)
            done = await client.upload(folder, Publication(name, tags=["prod"]))
            acknowledged[name][done.version.version] = done.version.digest

    for _ in range(3):
        await process.start(**shared)
        async with RegistryClient(process.address, Credentials()) as client:
            await register_base(client)
            names = ("sql", "sql", "mail")
            trainers = [asyncio.create_task(train(client, name)) for name in names]
            num_before, num_more = num_acknowledged(), chance.randint(1, 6)
            while num_acknowledged() < num_before + num_more:
                await asyncio.sleep(0.001)
            await asyncio.sleep(chance.uniform(0.0, 0.05))
            await process.kill()
            for trainer in trainers:
                trainer.cancel()
            await asyncio.gather(*trainers, return_exceptions=True)
        await process.start(**shared)
        async with RegistryClient(process.address, Credentials()) as client:
            await _check_acknowledged(client, acknowledged, tmp_path / "pulled")
        await process.kill()
    await _collect(objects_url)
    await process.start(**shared)
    async with RegistryClient(process.address, Credentials()) as client:
        await _check_acknowledged(client, acknowledged, tmp_path / "pulled again")


async def _check_acknowledged(
    client: RegistryClient, acknowledged: dict[str, dict[int, str]], folder: Path
) -> None:
    """All that was acknowledged is there, tags are not behind it, and all bytes can be read."""
    found = {v.ref: v.digest async for v in client.list(all_versions=True)}
    for ref in found:
        await client.pull(ref, folder / ref.replace("/", "-"), force=True)
    for name, versions in acknowledged.items():
        assert {f"default/{name}:v{n}": digest for n, digest in versions.items()}.items() <= (
            found.items()
        )
        for tag in ("latest", "prod"):
            assert (await client.get(f"{name}:{tag}")).version.version >= max(versions)


def _second(step: str) -> str:
    """Arm a step for the second upload: the first one passes each as often as it lists it."""
    name, _, count = step.partition(":")
    per_upload = sum(listed.partition(":")[0] == name for listed in STEPS)
    return f"{name}:{per_upload + int(count or 1)}"


async def _collect(objects_url: str) -> ObjectStore:
    """A collection that finds everything old enough leaves what versions need, and nothing else."""
    store = open_store(objects_url)
    collector = Collector(store, min_age_s=ANY_AGE_S, session_max_age_s=ANY_AGE_S)
    await collector.collect()
    assert await orphans_of(store) == set()
    assert [info.key async for info in store.list_objects(layout.UPLOADS)] == []
    return store


async def _check_no_orphans(objects_url: str) -> None:
    store = await _collect(objects_url)
    blobs = [info.key async for info in store.list_objects(layout.BLOBS)]
    assert len(blobs) == 6, "two versions of manifest, config and tensors"
