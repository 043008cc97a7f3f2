"""Workers come, go, come back as something else, and hide behind names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.api.residency import Tier, WorkerLoad
from loraplex.v1 import worker_pb2
from loraplex_services.common.grpc.channels import Channels
from loraplex_services.common.security.tls import TlsFiles
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.link import updated
from loraplex_services.gateway.workers.view import WorkerView
from tests.certificates import Authority
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import ROUTING, ScriptedWorker, start_worker
from tests.servers import free_port


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    made = TemplatePool()
    yield made
    await made.close()


def _status(*adapters: worker_pb2.AdapterResidency, full: bool) -> worker_pb2.WatchStatusResponse:
    return worker_pb2.WatchStatusResponse(epoch=2, full=full, ready=True, adapters=adapters)


def _at(digest: str, tier: worker_pb2.AdapterTier) -> worker_pb2.AdapterResidency:
    return worker_pb2.AdapterResidency(digest=digest, tier=tier)


def test_deltas_change_what_they_name_and_snapshots_replace_all() -> None:
    view = WorkerView("w", "a", "base")
    view = updated(view, _status(_at("x", worker_pb2.ADAPTER_TIER_DEVICE), full=True))
    view = updated(view, _status(_at("y", worker_pb2.ADAPTER_TIER_DISK), full=False))
    assert (view.tier_of("x"), view.tier_of("y")) == (Tier.DEVICE, Tier.DISK)
    view = updated(view, _status(_at("x", worker_pb2.ADAPTER_TIER_UNSPECIFIED), full=False))
    assert (view.tier_of("x"), view.tier_of("y")) == (Tier.NONE, Tier.DISK)
    view = updated(view, _status(full=True))
    assert not view.adapters


def test_batch_capacity_is_what_other_gateways_leave_and_a_full_worker_has_none() -> None:
    load = WorkerLoad(running_requests=20, waiting_requests=4, max_running_requests=32)
    view = WorkerView("w", "a", "base", load=load, in_flight=10)
    assert view.batch_capacity == 32 - 14
    assert replace(view, in_flight=40).batch_capacity == 32
    assert replace(view, load=replace(load, is_full=True)).batch_capacity == 10
    assert WorkerView("w", "a", "base", in_flight=3).batch_capacity == 0


async def test_names_are_looked_up(pool: TemplatePool) -> None:
    port = free_port()
    server = await start_worker(ScriptedWorker(), f"127.0.0.1:{port}")
    fleet = Fleet([f"dns:localhost:{port}"], "g0", pool, base_seen=lambda _: None)
    running = asyncio.create_task(fleet.run())
    await eventually(lambda: any(view.takes_requests for view in fleet.views("base")))
    assert f"127.0.0.1:{port}" in {view.address for view in fleet.views()}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert fleet.views() == []
    await server.stop(None)


async def test_certificates_of_workers_found_by_name_contain_the_name(
    pool: TemplatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    house, port = Authority(tmp_path), free_port()
    pair = house.issue("localhost", name_only=True)
    tls = TlsFiles(house.ca, pair.cert, pair.key)
    server_tls = tls.server(for_services=True)
    assert server_tls is not None
    server = await start_worker(
        ScriptedWorker(), f"127.0.0.1:{port}", credentials=server_tls.credentials()
    )
    addresses = [f"dns:localhost:{port}", f"127.0.0.1:{port}"]
    by_name, by_address = (
        Fleet([address], "g0", pool, base_seen=lambda _: None, channels=Channels(tls))
        for address in addresses
    )
    running = [asyncio.create_task(fleet.run()) for fleet in (by_name, by_address)]
    await eventually(lambda: any(view.takes_requests for view in by_name.views("base")))
    assert by_address.views("base") == [], "the certificate has no 127.0.0.1"
    await eventually(
        lambda: any(
            "is not in peer certificate" in record.__dict__.get("problem", "")
            for record in caplog.records
        )
    )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await server.stop(None)


async def test_a_name_that_is_unknown_yet_is_looked_up_again(pool: TemplatePool) -> None:
    fleet = Fleet(["dns:nowhere.invalid:1"], "g0", pool, base_seen=lambda _: None)
    running = asyncio.create_task(fleet.run())
    _, pending = await asyncio.wait([running], timeout=2)
    assert pending, running.exception()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_worker_that_returns_with_another_context_is_taken_as_it_is(stack: Stack) -> None:
    await stack.start()
    await stack.stop_server("w0")
    await stack.until_ready(0)
    await stack.start_worker(ScriptedWorker(max_model_len=32))
    await stack.until_ready(1)
    models = await stack.openai().models.list()
    assert models.data[0].model_extra is not None
    assert models.data[0].model_extra["max_model_len"] == 32


async def test_worker_that_returns_with_larger_adapters_is_registered_again(stack: Stack) -> None:
    await stack.start()
    await stack.stop_server("w0")
    await stack.until_ready(0)
    changed = ScriptedWorker()
    changed.max_lora_rank = 512
    await stack.start_worker(changed)
    await eventually(lambda: stack.registry.bases[-1].max_lora_rank == 512)


async def test_a_base_has_the_limits_that_all_its_workers_keep(stack: Stack) -> None:
    stack.workers = [ScriptedWorker("w0"), ScriptedWorker("w1", max_model_len=32)]
    stack.workers[0].max_lora_rank = 64
    stack.workers[1].has_experts = True
    await stack.start()
    for name in ("w1", "w0"):
        await stack.stop_server(name)
        await stack.until_ready(1)
        await stack.start_worker(stack.workers[int(name[1])])
        await stack.until_ready(2)
        model = stack.running._fleet.served("base").model
        assert (model.max_model_len, model.max_lora_rank, model.routing_bytes) == (32, 64, 0)
    await eventually(lambda: stack.registry.bases[-1].max_lora_rank == 64)
    await stack.running._fleet._keep([stack.worker_address("w1")])
    model = stack.running._fleet.served("base").model
    assert (model.max_lora_rank, model.routing_bytes) == (256, ROUTING.token_bytes)
    await eventually(lambda: stack.registry.bases[-1].max_lora_rank == 256)


async def test_a_worker_that_returns_with_another_base_leaves_its_limits_behind(
    stack: Stack,
) -> None:
    stack.workers = [ScriptedWorker("w0"), ScriptedWorker("w1", max_model_len=32)]
    await stack.start()
    assert stack.running._fleet.served("base").model.max_model_len == 32
    await stack.stop_server("w1")
    await stack.until_ready(1)
    await stack.start_worker(ScriptedWorker("w1", "other", max_model_len=64))
    await stack.until_ready(2)
    lengths = {name: model.max_model_len for name, model in stack.running._fleet.bases().items()}
    assert lengths == {"base": 512, "other": 64}


async def test_a_worker_that_differs_from_others_in_more_than_limits_is_named_in_the_log(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    stack.workers = [ScriptedWorker("w0"), ScriptedWorker("w1", max_model_len=32)]
    await stack.start()
    warning = "a worker differs from others of its base"
    assert warning not in caplog.messages
    await stack.stop_server("w1")
    await stack.until_ready(1)
    changed = ScriptedWorker("w1")
    changed.generation_config_json = '{"temperature": 0.5}'
    await stack.start_worker(changed)
    await stack.until_ready(2)
    entry = next(vars(record) for record in caplog.records if record.message == warning)
    assert (entry["worker"], entry["fields"]) == ("w1", "generation_config_json")


async def test_bases_stay_known_while_their_workers_are_away(stack: Stack) -> None:
    await stack.start()
    await stack.stop_server("w0")
    models = await stack.openai().models.list()
    assert [model.id for model in models.data] == ["base"]


async def test_several_bases_are_served_side_by_side(stack: Stack) -> None:
    stack.workers = [ScriptedWorker("w0", "first"), ScriptedWorker("w1", "second")]
    stack.registry.put("upper", base_id="second")
    await stack.start()
    for model, worker in (("first", "w0"), ("second", "w1"), ("upper", "w1")):
        before = {w.worker_id: len(w.requests) for w in stack.workers}
        await stack.openai().completions.create(model=model, prompt="x")
        after = {w.worker_id: len(w.requests) for w in stack.workers}
        assert [w for w in after if after[w] > before[w]] == [worker]


async def test_base_without_tokenizer_serves_ids(stack: Stack) -> None:
    stack.workers = [ScriptedWorker(files={"config.json": b"{}"})]
    await stack.start()
    answer = await stack.openai().completions.create(
        model="base", prompt=[1, 2], max_tokens=4, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == ""
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["token_ids"]) == 4


async def test_tokenizer_is_fetched_once_for_all_workers(stack: Stack) -> None:
    stack.workers = [ScriptedWorker("w0"), ScriptedWorker("w1")]
    await stack.start()
    await stack.stop_server("w0")
    await stack.start_worker(stack.workers[0])
    await stack.until_ready(2)
    assert sum(worker.num_tokenizers_sent for worker in stack.workers) <= 2


async def test_gateway_acknowledges_the_steps_that_it_has_read(stack: Stack) -> None:
    await stack.start()
    await stack.openai().completions.create(model="base", prompt="x", max_tokens=20)
    await eventually(lambda: stack.workers[0].is_all_acked)
    assert stack.workers[0].num_tokens_sent > 3
