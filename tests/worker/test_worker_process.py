"""A worker from the outside: two processes, a socket, a store of adapters."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from loraplex.api.error_wire import from_rpc_error
from loraplex.errors import DataLoss, InvalidRequest, NotFound
from loraplex.v1 import common_pb2, worker_pb2
from loraplex_services.common.objects.store import blob_key
from loraplex_services.worker.server.engine_client import MAX_FAILED_STARTS
from tests.worker import tiny
from tests.worker.worker_process import (
    SessionCall,
    WorkerProcess,
    publish_adapters,
    request,
    until_health,
    until_status,
    worker_folder,
)

pytestmark = pytest.mark.e2e

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MISSING = "sha256:" + "0" * 64
STEP_TIMEOUT_S = 4


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with worker_folder() as worker:
        asyncio.run(publish_adapters(worker, ["one", "two", "three", "four", "damaged"]))
        damaged = worker.root / "objects" / blob_key(_tensor_sha256(worker, "damaged"))
        damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
        worker.start(LORAPLEX_DEBUG=f"step-timeout-s={STEP_TIMEOUT_S},overlap=on")
        yield worker


def _tensor_sha256(worker: WorkerProcess, name: str) -> str:
    tensors = worker.root / name / "adapter_model.safetensors"
    return hashlib.sha256(tensors.read_bytes()).hexdigest()


def is_idle(message: worker_pb2.WatchStatusResponse) -> bool:
    load = message.load
    running = load.running_requests + load.waiting_requests
    return load.total_blocks > 0 and running == 0


async def test_streams_adapters_and_the_base_from_one_session(worker: WorkerProcess) -> None:
    names = ["one", "two", "three"]
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("base"), *(request(n, worker.digests[n]) for n in names))
        await session.until_ended("base", *names)
        assert session.errors == {}
        assert session.steps == sorted(set(session.steps)), "one message a step"
        assert len({tuple(tokens) for tokens in session.tokens.values()}) == 4
        assert set(session.finished.values()) == {common_pb2.FINISH_REASON_LENGTH}
        session.close()


async def test_generate_gives_the_tokens_of_the_session(worker: WorkerProcess) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("r", worker.digests["one"], temperature=0.8))
        await session.until_ended("r")
        alone = request("r", worker.digests["one"], temperature=0.8)
        call = stub.Generate(worker_pb2.WorkerServiceGenerateRequest(request=alone))
        events = [message.event async for message in call]
        assert [i for event in events for i in event.token_ids] == session.tokens["r"]
        assert events[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert events[-1].timings.prefill_s > 0
        session.close()


async def test_a_resumed_request_sends_only_what_is_new(worker: WorkerProcess) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("r", worker.digests["two"], temperature=0.7))
        await session.until_ended("r")
        tokens = session.tokens["r"]
        resumed = request("again", worker.digests["two"], temperature=0.7, output_ids=tokens[:3])
        session.tokens["again"] = tokens[:3]
        await session.submit(resumed)
        await session.until_ended("again")
        assert session.tokens["again"] == tokens
        session.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [5, tiny.VOCAB]}, "prompt_ids[1]"),
        ({"prompt_ids": [5] * 250}, "sampling.max_tokens"),
        ({"output_ids": [1] * 8}, "output_ids"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"min_tokens": 9}, "sampling.min_tokens"),
        ({"stop_token_ids": [tiny.VOCAB]}, "sampling.stop_token_ids[0]"),
    ],
)
async def test_bad_requests_are_refused_by_field_and_others_go_on(
    worker: WorkerProcess, changes: dict[str, object], field: str
) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("good"), request("bad", **changes))
        await session.until_ended("good", "bad")
        error = session.errors["bad"]
        assert isinstance(error, InvalidRequest)
        assert [violation.field for violation in error.violations] == [field]
        assert len(session.tokens["good"]) == 8
        session.close()


async def test_adapters_that_cannot_be_had_fail_their_own_requests_only(
    worker: WorkerProcess,
) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(
            request("missing", MISSING),
            request("damaged", worker.digests["damaged"]),
            request("misspelt", "sha256:short"),
            request("good", worker.digests["three"]),
        )
        await session.until_ended("missing", "damaged", "misspelt", "good")
        assert isinstance(session.errors["missing"], NotFound)
        assert session.errors["missing"].reason == "ADAPTER_NOT_FOUND"
        assert isinstance(session.errors["damaged"], DataLoss)
        assert session.errors["misspelt"].violations[0].field == "adapters.digest"
        assert len(session.tokens["good"]) == 8
        quarantined = [path.name for path in (worker.root / "cache/quarantine").iterdir()]
        assert quarantined == [worker.digests["damaged"].removeprefix("sha256:")]
        session.close()


async def test_a_cancel_frees_the_blocks(worker: WorkerProcess) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("long", max_tokens=240))
        await session.step()
        await session.cancel("long")
        status = await until_status(stub, is_idle)
        assert status.load.free_blocks == status.load.total_blocks
        assert "long" not in session.finished
        session.close()


async def test_a_gateway_that_goes_away_cancels_its_requests(worker: WorkerProcess) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("long", max_tokens=240), request("too", max_tokens=240))
        await session.step()
        session.close()
        status = await until_status(stub, is_idle)
        assert status.load.free_blocks == status.load.total_blocks


async def test_a_watch_begins_with_a_snapshot_and_goes_on_with_deltas(
    worker: WorkerProcess,
) -> None:
    async with worker.connected() as stub:
        watch = stub.WatchStatus(worker_pb2.WatchStatusRequest())
        first = await watch.read()
        assert first.full and first.ready and first.sequence == 1
        session = await SessionCall(stub).open()
        await session.submit(request("r", worker.digests["one"]))
        await session.until_ended("r")
        second = await watch.read()
        assert not second.full and second.sequence == 2 and second.epoch == first.epoch
        watch.cancel()
        session.close()


async def test_get_model_describes_the_base(worker: WorkerProcess) -> None:
    async with worker.connected() as stub:
        model = await stub.GetModel(worker_pb2.GetModelRequest(include_tokenizer=True))
        assert (model.base_id, model.vocab_size, model.max_model_len) == ("base", 96, 256)
        assert list(model.eos_token_ids) == [tiny.EOS] and model.bos_token_id == 1
        geometry = tiny.base_geometry(worker.root / "base")
        assert model.geometry.fingerprint == geometry.fingerprint
        assert [file.name for file in model.tokenizer_files] == ["config.json"]
        bare = await stub.GetModel(worker_pb2.GetModelRequest())
        assert not bare.tokenizer_files and bare.tokenizer_digest == model.tokenizer_digest


async def lose_engine(worker: WorkerProcess, number: int) -> None:
    """Signal the engine amid a stream, see the stream fail, then see a new epoch serve."""
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("r", worker.digests["one"], max_tokens=250))
        await session.step()
        worker.engine().send_signal(number)
        with pytest.raises(grpc.RpcError) as caught:
            await session.until_ended("r")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert from_rpc_error(caught.value).reason == "ENGINE_LOST"
    async with worker.connected() as stub:
        again = await SessionCall(stub).open()
        assert again.epoch > session.epoch
        await again.submit(request("r", worker.digests["one"]))
        await again.until_ended("r")
        assert len(again.tokens["r"]) == 8
        again.close()


async def test_a_killed_engine_fails_its_streams_and_is_replaced(worker: WorkerProcess) -> None:
    await lose_engine(worker, signal.SIGKILL)


async def test_a_hanging_engine_is_replaced(worker: WorkerProcess) -> None:
    await lose_engine(worker, signal.SIGSTOP)


async def test_a_worker_that_was_stopped_with_its_engine_goes_on(worker: WorkerProcess) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("r", worker.digests["one"], max_tokens=250))
        await session.step()
        engine = worker.engine()
        processes = [engine.parent(), engine]
        for process in processes:
            process.suspend()
        await asyncio.sleep(STEP_TIMEOUT_S + 1)
        for process in processes:
            process.resume()
        await session.until_ended("r")
        assert not session.errors
        assert worker.engine() == engine
        session.close()


async def test_a_request_that_crashes_two_engines_is_refused_and_others_go_on(
    worker: WorkerProcess,
) -> None:
    fatal = {"prompt_ids": [7, 7, 7], "max_tokens": 250}
    for _ in range(2):
        async with worker.connected() as stub:
            session = await SessionCall(stub).open()
            await session.submit(request("fatal", **fatal))
            await session.step()
            worker.engine().send_signal(signal.SIGSEGV)
            with pytest.raises(grpc.RpcError):
                await session.until_ended("fatal")
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("fatal", **fatal), request("good"))
        await session.until_ended("fatal", "good")
        assert session.errors["fatal"].reason == "ENGINE_CRASHED"
        assert len(session.tokens["good"]) == 8
        session.close()


async def test_it_serves_from_the_moment_it_says_so_until_requests_ended_after_a_sigterm() -> None:
    with worker_folder() as fresh:
        await publish_adapters(fresh, ["one"])
        fresh.start(LORAPLEX_DRAIN_S="30")
        async with grpc.aio.insecure_channel(fresh.address) as channel:
            assert await until_health(channel, "liveness", SERVING) == [SERVING]
            assert await until_health(channel, "readiness", SERVING) == [NOT_SERVING, SERVING]
        async with fresh.connected() as stub:
            session = await SessionCall(stub).open()
            await session.submit(request("r", fresh.digests["one"], max_tokens=200))
            await session.step()
            assert fresh.process is not None
            fresh.process.send_signal(signal.SIGTERM)
            await until_status(stub, lambda message: message.draining and not message.ready)
            late = worker_pb2.WorkerServiceGenerateRequest(request=request("late"))
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Generate(late).read()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            await session.until_ended("r")
            assert len(session.tokens["r"]) == 200
        code, log = await asyncio.to_thread(fresh.wait)
    assert code == 0, log


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"LORAPLEX_MODEL": "/nowhere/at/all"}, "LORAPLEX_MODEL"),
        ({"LORAPLEX_OBJECTS": "ftp://x"}, "LORAPLEX_OBJECTS"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(changes: dict[str, str], named: str) -> None:
    with worker_folder() as fresh:
        fresh.start(**changes)
        code, log = fresh.wait()
    assert code == 2 and named in log.splitlines()[-1], log


def test_a_port_in_use_is_named_and_ends_the_engine_that_has_started_meanwhile() -> None:
    with worker_folder() as fresh, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        fresh.start(LORAPLEX_WORKER_LISTEN=address)
        code, log = fresh.wait()
    assert code == 2 and address in log.splitlines()[-1], log
    assert 0 <= log.find("engine started") < log.find("engine ended"), log


def test_a_model_that_cannot_be_served_ends_the_worker_with_the_reason() -> None:
    with worker_folder() as fresh:
        (fresh.root / "base/model.safetensors").write_bytes(b"\xff" * 64)
        fresh.start()
        code, log = fresh.wait()
    assert code not in (0, None) and "model.safetensors" in log.splitlines()[-1], log


def test_engines_that_never_become_ready_end_the_worker_with_the_reason() -> None:
    with worker_folder() as fresh:
        (fresh.root / "broken").mkdir()
        (fresh.root / "broken/torch.py").write_text("raise ImportError('a torch that is broken')")
        path = f"{fresh.root}/broken{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        fresh.start(PYTHONPATH=path)
        code, log = fresh.wait()
    assert log.count("ImportError: a torch that is broken") == MAX_FAILED_STARTS, log
    assert code == 6 and "ended 3 times before it was ready" in log.splitlines()[-1], log


async def test_more_adapters_than_disk_cache_and_arena_hold_still_give_their_own_tokens() -> None:
    names = ["one", "two", "three", "four", "five"]
    with worker_folder() as fresh:
        await publish_adapters(fresh, names)
        fresh.start(LORAPLEX_CACHE_BYTES="20KiB", LORAPLEX_KV_MEMORY="32KiB")
        async with fresh.connected() as stub:
            session = await SessionCall(stub).open()
            order = [name for turn in range(3) for name in names[turn:] + names[:turn]]
            ids = [f"{name}-{index}" for index, name in enumerate(order)]
            for request_id, name in zip(ids, order, strict=True):
                await session.submit(request(request_id, fresh.digests[name]))
            await session.until_ended(*ids)
            assert session.errors == {}
            tokens = {
                name: {tuple(session.tokens[i]) for i in ids if i.startswith(f"{name}-")}
                for name in names
            }
            assert all(len(outputs) == 1 for outputs in tokens.values())
            assert len(set.union(*tokens.values())) == len(names)
            status = await until_status(stub, lambda message: message.full and is_idle(message))
            tiers = [a.tier for a in status.adapters]
            assert tiers.count(worker_pb2.ADAPTER_TIER_DEVICE) < len(names)
            session.close()


async def test_a_server_with_a_token_serves_only_who_shows_it() -> None:
    with worker_folder() as fresh:
        (fresh.root / "token").write_text("secret")
        (temporary := fresh.root / "tmp").mkdir()
        token = str(fresh.root / "token")
        fresh.start(LORAPLEX_SERVICE_TOKEN_FILE=token, LORAPLEX_STATE_DIR="", TMPDIR=str(temporary))
        async with fresh.connected() as stub:
            with pytest.raises(grpc.RpcError) as caught:
                await stub.GetModel(worker_pb2.GetModelRequest())
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            shown = (("authorization", "Bearer secret"),)
            model = await stub.GetModel(worker_pb2.GetModelRequest(), metadata=shown)
            assert model.base_id == "base"
        assert list(temporary.glob("loraplex-cache-*"))
        fresh.stop()
        assert not list(temporary.glob("loraplex-cache-*"))


async def test_the_engine_does_not_outlive_its_api_server() -> None:
    with worker_folder() as fresh:
        await publish_adapters(fresh, ["one"])
        fresh.start()
        async with fresh.connected():
            engine = fresh.engine()
        code, _ = fresh.stop(signal.SIGKILL)
        assert code == -signal.SIGKILL
        engine.wait(timeout=30)
