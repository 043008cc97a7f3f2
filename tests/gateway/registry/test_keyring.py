"""API keys: checked, remembered for a moment, kept while the registry is away."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import openai
import pytest

from loraplex.errors import (
    AdapterNotFound,
    LoraplexError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from loraplex.refs import Ref
from loraplex.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    worker_pb2,
)
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import MAX_UNCHECKED_KEY_S, MAX_WRONG_KEYS_PER_PEER
from loraplex_services.common.security.wrong_keys import current_peer, peer_of_host
from loraplex_services.gateway.registry.keyring import CHECK_AGAIN_S, FRESH_S, MAX_REFUSED, KeyRing
from tests.gateway.conftest import Stack, eventually

READER = "lpx_reader01_" + "a" * 32
ADMIN = "lpx_admin001_" + "b" * 32


class RegistryLookup:
    """Knows keys, or is away."""

    def __init__(self) -> None:
        self.keys = {READER: Caller("acme", "reader01", frozenset({"reader"}))}
        self.num_asked = 0
        self.error: LoraplexError | None = None
        self.now_s = 0.0

    async def check(self, token: str) -> Caller:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        if token not in self.keys:
            raise Unauthenticated("unknown key")
        return self.keys[token]

    def ring(self) -> KeyRing:
        return KeyRing(self.check, lambda: self.now_s, lambda: self.now_s)


@contextmanager
def calls_from(address: str) -> Iterator[None]:
    token = current_peer.set(peer_of_host(address))
    try:
        yield
    finally:
        current_peer.reset(token)


async def test_answers_are_remembered_for_a_moment() -> None:
    registry = RegistryLookup()
    ring = registry.ring()
    for _ in range(3):
        assert (await ring.caller(f"Bearer {READER}")).tenant == "acme"
    assert registry.num_asked == 1
    registry.now_s += FRESH_S + 0.1
    await ring.caller(f"bearer {READER}")
    assert registry.num_asked == 2


@pytest.mark.hostile
async def test_a_key_in_use_does_not_wait_for_a_registry_that_others_keep_busy() -> None:
    registry = RegistryLookup()
    ring, answers = registry.ring(), asyncio.Event()
    await ring.caller(f"Bearer {READER}")
    ask = ring._check

    async def slowly(token: str) -> Caller:
        await answers.wait()
        return await ask(token)

    ring._check = slowly
    registry.now_s += CHECK_AGAIN_S + 0.1
    for _ in range(3):
        await ring.caller(f"Bearer {READER}")
    assert registry.num_asked == 1
    answers.set()
    while registry.num_asked < 2:
        await asyncio.sleep(0)
    registry.now_s += FRESH_S - 0.1
    await ring.caller(f"Bearer {READER}")
    assert registry.num_asked == 2, "the answer that came meanwhile is used"


@pytest.mark.parametrize(
    ("authorization", "why"),
    [("", "requires an API key.*LORAPLEX_API_KEY"), ("Bearer sk-1234", "unknown.*lpx_")],
)
async def test_a_missing_key_and_one_of_another_service_are_told_apart(
    authorization: str, why: str
) -> None:
    registry = RegistryLookup()
    with pytest.raises(Unauthenticated, match=why):
        await registry.ring().caller(authorization)
    assert registry.num_asked == 0


async def test_revoked_key_stops_working() -> None:
    registry = RegistryLookup()
    ring = registry.ring()
    await ring.caller(f"Bearer {READER}")
    registry.keys.clear()
    registry.now_s += FRESH_S + 0.1
    with pytest.raises(Unauthenticated):
        await ring.caller(f"Bearer {READER}")


async def test_good_keys_stay_good_while_the_registry_is_away_and_new_ones_wait() -> None:
    registry = RegistryLookup()
    ring = registry.ring()
    await ring.caller(f"Bearer {READER}")
    registry.error = Unavailable("away")
    registry.now_s += 1000
    assert (await ring.caller(f"Bearer {READER}")).tenant == "acme"
    with pytest.raises(Unavailable):
        await ring.caller(f"Bearer {ADMIN}")


@pytest.mark.hostile
async def test_a_key_that_expires_while_the_registry_is_away_stops_working() -> None:
    registry = RegistryLookup()
    registry.keys[READER] = replace(registry.keys[READER], expires_unix_s=500.0)
    ring = registry.ring()
    await ring.caller(f"Bearer {READER}")
    registry.error = Unavailable("away")
    registry.now_s = 499.0
    await ring.caller(f"Bearer {READER}")
    for registry.now_s in (500.0, 510.0):
        with pytest.raises(Unauthenticated, match="has expired"):
            await ring.caller(f"Bearer {READER}")


@pytest.mark.hostile
async def test_a_key_that_cannot_be_checked_works_for_a_bounded_time() -> None:
    registry = RegistryLookup()
    ring = registry.ring()
    await ring.caller(f"Bearer {READER}")
    registry.error = Unavailable("away")
    for registry.now_s in range(0, int(MAX_UNCHECKED_KEY_S), 3600):
        await ring.caller(f"Bearer {READER}")
    registry.now_s = MAX_UNCHECKED_KEY_S + 10
    with pytest.raises(Unavailable):
        await ring.caller(f"Bearer {READER}")


@pytest.mark.hostile
async def test_a_peer_that_sends_wrong_keys_is_refused_without_asking_the_registry() -> None:
    registry = RegistryLookup()
    ring = registry.ring()
    refused = Counter[str]()
    with calls_from("192.0.2.1"):
        for n in range(200):
            with pytest.raises(LoraplexError) as caught:
                await ring.caller(f"Bearer lpx_guess{n:04}_{'x' * 32}")
            refused[caught.value.reason] += 1
    assert refused["INVALID_API_KEY"] == registry.num_asked == MAX_WRONG_KEYS_PER_PEER
    assert refused["TOO_MANY_WRONG_KEYS"] == 200 - MAX_WRONG_KEYS_PER_PEER
    with calls_from("192.0.2.2"):
        await ring.caller(f"Bearer {READER}")
    registry.now_s += FRESH_S + 0.1
    with calls_from("192.0.2.1"):
        caller = await ring.caller(f"Bearer {READER}")
    assert caller.tenant == "acme", "a known key is not affected"


@pytest.mark.parametrize("header", ["", "Bearer", f"Basic {READER}", "Bearer nonsense", READER])
async def test_what_is_no_key_is_refused_without_asking(header: str) -> None:
    registry = RegistryLookup()
    with pytest.raises(Unauthenticated):
        await registry.ring().caller(header)
    assert registry.num_asked == 0


async def test_key_without_a_scope_may_not_run() -> None:
    registry = RegistryLookup()
    registry.keys[READER] = Caller("acme", "reader01", frozenset())
    with pytest.raises(PermissionDenied):
        await registry.ring().caller(f"Bearer {READER}")


def _with_keys(stack: Stack) -> None:
    stack.wants_keys = True
    stack.registry.keys = {
        READER: registry_pb2.Key(key_id="reader01", tenant="acme", scopes=["reader"]),
        ADMIN: registry_pb2.Key(key_id="admin001", tenant="acme", scopes=["admin"]),
    }


async def test_tenants_see_and_run_their_own(stack: Stack) -> None:
    _with_keys(stack)
    stack.registry.put("mine", tenant="acme")
    stack.registry.put("theirs", tenant="other")
    stack.registry.put("shown", tenant="other", visibility=registry_pb2.VISIBILITY_PUBLIC)
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    client = stack.openai().with_options(api_key=READER)
    page = await client.models.list()
    assert [model.id for model in page.data] == ["base", "mine", "other/shown"]
    for model in ("mine", "acme/mine:v1", "other/shown"):
        await client.completions.create(model=model, prompt="x")
    assert {request.tenant for request in stack.workers[0].requests} == {"acme"}
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other/theirs", prompt="x")
    with pytest.raises(openai.AuthenticationError) as caught:
        await stack.openai().models.list()
    assert caught.value.code == "invalid_api_key"


async def test_operator_apis_are_for_admins(stack: Stack) -> None:
    _with_keys(stack)
    await stack.start(ready=False)
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.GetStatusRequest()
        for token, code in ((READER, "PERMISSION_DENIED"), ("", "UNAUTHENTICATED")):
            metadata = (("authorization", f"Bearer {token}"),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(request, metadata=metadata)
            assert caught.value.code().name == code
        await stub.GetStatus(request, metadata=(("authorization", f"Bearer {ADMIN}"),))


@pytest.mark.hostile
async def test_tenants_admin_sees_no_other_tenants_adapters_on_workers(stack: Stack) -> None:
    _with_keys(stack)
    root = "lpx_root0001_" + "c" * 32
    stack.registry.keys[root] = registry_pb2.Key(
        key_id="root0001", tenant="default", scopes=["admin", "root"]
    )
    put = [stack.registry.put("mine", tenant="acme"), stack.registry.put("theirs", tenant="other")]
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    stack.workers[0].publish(
        *(
            worker_pb2.AdapterResidency(
                digest=version.digest, tier=worker_pb2.ADAPTER_TIER_DEVICE, max_rank=8
            )
            for version in put
        )
    )
    await eventually(lambda: any(len(view.adapters) == 2 for view in stack.running._fleet.views()))

    async def shown(token: str) -> set[str]:
        async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
            answer = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(include_adapters=True),
                metadata=(("authorization", f"Bearer {token}"),),
            )
        return {adapter.ref for worker in answer.workers for adapter in worker.adapters}

    assert await shown(ADMIN) == {"acme/mine:v1"}
    assert await shown(root) == {"acme/mine:v1", "other/theirs:v1"}


async def test_the_first_admin_key_runs_the_adapters_of_all_tenants(stack: Stack) -> None:
    """`registry certify` measures them with this key, and only its certificates count."""
    _with_keys(stack)
    root = "lpx_root0001_" + "c" * 32
    stack.registry.keys[root] = registry_pb2.Key(
        key_id="root0001", tenant="default", scopes=["admin", "root"]
    )
    theirs = stack.registry.put("theirs", tenant="other")
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    operator, admin = (stack.openai().with_options(api_key=key) for key in (root, ADMIN))
    await operator.completions.create(model="other/theirs", prompt="x")
    model = await operator.models.retrieve("other/theirs:v1")
    assert model.to_dict()["root"] == theirs.digest
    [ran] = stack.workers[0].requests
    assert [adapter.digest for adapter in ran.adapters] == [theirs.digest]
    generate = inference_pb2.GenerateRequest(model="other/theirs", text="x")
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for key, code in ((root, "OK"), (ADMIN, "NOT_FOUND")):
            call = stub.Generate(generate, metadata=(("authorization", f"Bearer {key}"),))
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [message.text async for message in call]
            assert (await call.code()).name == code
    with pytest.raises(openai.NotFoundError):
        await admin.completions.create(model="other/theirs", prompt="x")


@pytest.mark.hostile
async def test_refusal_of_a_private_adapter_takes_the_path_of_a_missing_one(stack: Stack) -> None:
    _with_keys(stack)
    stack.registry.put("theirs", tenant="other")
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    resolver = stack.running._resolver
    lookups: list[str] = []
    lookup = resolver._registry.lookup

    async def counted(ref: Ref, split_key: str, base_ids: Collection[str]) -> Any:
        lookups.append(ref.name)
        return await lookup(ref, split_key, base_ids)

    resolver._registry.lookup = counted  # type: ignore[method-assign]
    for name in ("theirs", "missing"):
        with pytest.raises(AdapterNotFound):
            await resolver.model(f"other/{name}", "acme")
    assert lookups == ["theirs", "missing"]


@pytest.mark.hostile
async def test_bad_keys_take_no_memory_that_grows_and_displace_no_good_key() -> None:
    """An exception that was kept held the frames of each request that it refused: 19 KB a key."""
    registry = RegistryLookup()
    ring = registry.ring()
    await ring.caller(f"Bearer {READER}")

    async def refused(number: int) -> None:
        body = bytearray(4096)
        with pytest.raises(Unauthenticated):
            await ring.caller(f"Bearer lpx_bad{number:08}_{'c' * 32}")
        assert body

    tracemalloc.start()
    try:
        for number in range(MAX_REFUSED + 500):
            await refused(number)
            await refused(number)
        gc.collect()
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < MAX_REFUSED * 1024
    num_asked = registry.num_asked
    await ring.caller(f"Bearer {READER}")
    assert registry.num_asked == num_asked, "the good key is remembered still"


@pytest.mark.hostile
async def test_each_refusal_of_a_remembered_bad_key_is_an_error_of_its_own() -> None:
    ring = RegistryLookup().ring()
    errors = []
    for _ in range(3):
        with pytest.raises(Unauthenticated) as caught:
            await ring.caller(f"Bearer {ADMIN}")
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    assert {(error.message, error.reason) for error in errors} == {
        ("unknown key", "INVALID_API_KEY")
    }
