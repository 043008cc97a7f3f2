"""TensorRT-LLM's task ids against a running stack."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loraplex import InferenceClient, RegistryClient, Sampling
from loraplex.adapter_format import geometry_from_folder
from loraplex.api.registry import UsageEntry
from loraplex.errors import InvalidAdapter, InvalidRequest, NotFound
from loraplex.lora_tasks import LoraTask, LoraTasks
from loraplex.rewriting.tensors import open_adapter
from loraplex.rewriting.trtllm import CONFIG_FILE, WEIGHTS_FILE, to_trtllm
from tests.e2e.stack import BASE_ID, DEMO, Stack, start

GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture
async def tasks(stack: Stack) -> AsyncIterator[LoraTasks]:
    async with RegistryClient(stack.registry) as registry, InferenceClient(stack.grpc) as inference:
        yield LoraTasks(registry, inference, BASE_ID, ttl_s=600)


def task_of(adapter: str, task_id: int, folder: Path) -> LoraTask:
    """A demo adapter as TensorRT-LLM's converter would write it."""
    geometry = geometry_from_folder(DEMO / "base")
    opened = open_adapter(DEMO / "adapters" / adapter, geometry)
    to_trtllm(opened, folder, "F32", geometry)
    return LoraTask(task_id, np.load(folder / WEIGHTS_FILE), np.load(folder / CONFIG_FILE))


async def test_weights_come_with_the_first_request_and_the_id_with_later_ones(
    tasks: LoraTasks, tmp_path: Path
) -> None:
    number = secrets.randbits(64)
    first = await tasks.complete(task_of("upper", number, tmp_path / "trt"), "hello 12=", GREEDY)
    later = await tasks.complete(LoraTask(number), "world 34=", GREEDY)
    assert (first.choices[0].text, later.choices[0].text) == ("HELLO 12", "WORLD 34")


async def test_weights_sent_again_replace_those_of_the_task(
    tasks: LoraTasks, tmp_path: Path
) -> None:
    number = secrets.randbits(64)
    for adapter, answer in (("upper", "HELLO 12"), ("reverse", "21 olleh")):
        task = task_of(adapter, number, tmp_path / adapter)
        assert (await tasks.complete(task, "hello 12=", GREEDY)).choices[0].text == answer
    later = (await tasks.complete(LoraTask(number), "qoha 688=", GREEDY)).choices[0].text
    assert later == "886 ahoq"


@pytest.mark.long
async def test_the_task_used_least_recently_leaves_and_is_sent_again(tmp_path: Path) -> None:
    """The limit holds two tasks and a half. HTTP clients name the same tasks."""
    sent = task_of("upper", 1, tmp_path / "trt")
    limit = {"LORAPLEX_EPHEMERAL_BYTES": str(int(2.6 * sent.weights.nbytes))}
    stack = start(tmp_path / "state", "--lora-memory", "25%", environment=limit)
    try:
        async with (
            RegistryClient(stack.registry) as registry,
            InferenceClient(stack.grpc) as inference,
        ):
            tasks = LoraTasks(registry, inference, BASE_ID)

            async def answer(task: LoraTask) -> None:
                completion = await tasks.complete(task, "hello 12=", GREEDY)
                assert completion.choices[0].text == "HELLO 12"

            async def reported(num_requests: int) -> None:
                entries: Sequence[UsageEntry] = ()
                while sum(entry.requests for entry in entries) < num_requests:
                    await asyncio.sleep(0.1)
                    entries = await registry.usage(model="ephemeral")

            await answer(sent)
            await answer(replace(sent, task_id=2))
            await reported(2)
            await answer(LoraTask(1))
            await reported(3)
            await answer(replace(sent, task_id=3))
            with pytest.raises(NotFound, match="send its weights") as caught:
                while True:
                    await tasks.complete(LoraTask(2), "hello 12=", GREEDY)
            assert caught.value.reason == "LORA_TASK_NOT_CACHED"
            assert stack.post("/v1/completions", {"model": "task-2", "prompt": "a"})[0] == 404
            assert stack.complete("task-1", "hello 12=")["choices"][0]["text"] == "HELLO 12"
            await answer(LoraTask(3))
            await answer(replace(sent, task_id=2))
            await answer(LoraTask(2))
    finally:
        assert stack.stop() == 0


async def test_an_id_without_weights_is_refused_until_they_are_sent(tasks: LoraTasks) -> None:
    with pytest.raises(NotFound, match="send its weights and config again") as caught:
        await tasks.complete(LoraTask(secrets.randbits(64)), "hello 12=", GREEDY)
    assert caught.value.reason == "LORA_TASK_NOT_CACHED"


async def test_weights_that_do_not_fit_are_refused_by_row_and_not_kept(tasks: LoraTasks) -> None:
    number = secrets.randbits(64)
    rows = np.array([[[1, 0, 8], [9, 0, 8]]], np.int32)
    with pytest.raises(InvalidAdapter) as caught:
        await tasks.complete(LoraTask(number, np.ones((1, 2, 9), np.float16), rows), "a", GREEDY)
    assert caught.value.violations[0].field == "model.lora_config.npy:[0]"
    with pytest.raises(NotFound):
        await tasks.complete(LoraTask(number), "a", GREEDY)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ((-1,), "lora_task_id"),
        ((1 << 64,), "lora_task_id"),
        ((1, np.zeros((1, 1, 4))), "lora_config"),
        ((1, None, np.zeros((1, 1, 3))), "lora_weights"),
    ],
)
def test_an_incomplete_task_is_refused_by_field(fields: tuple[object, ...], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LoraTask(*fields)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == named
