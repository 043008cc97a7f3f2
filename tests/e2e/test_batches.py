"""Batches on a real stack, with the official client, and with services that are killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack, eventually, start

NAMES = [path.name for path in ADAPTERS[:4]]


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=5)


def line(custom_id: str, url: str, **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(fields).encode()


def created(client: openai.OpenAI, url: Any, lines: list[bytes]) -> Any:
    file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def ended(client: openai.OpenAI, batch: Any, within_s: float) -> Any:
    deadline_s = time.monotonic() + within_s
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.2)
        batch = _patiently(client, batch.id, deadline_s)
    return batch


def _patiently(client: openai.OpenAI, batch_id: str, deadline_s: float) -> Any:
    """The batch, as soon as there is a gateway again."""
    while True:
        try:
            return client.batches.retrieve(batch_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


def outputs(client: openai.OpenAI, batch: Any) -> list[Any]:
    content = client.files.content(batch.output_file_id).content
    return [json.loads(each) for each in content.splitlines()]


def questions(num: int) -> tuple[list[bytes], dict[str, str]]:
    """Lines for several adapters, and what they should answer by custom_id."""
    lines, answers = [], {}
    for name in NAMES:
        for index, (prompt, want) in enumerate(held_out(name, num, seed=5)):
            custom_id = f"{name}-{index}"
            answers[custom_id] = want
            fields = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 32}
            lines.append(line(custom_id, "/v1/completions", **fields))
    return lines, answers


def test_a_batch_for_many_adapters_answers_right(stack: Stack) -> None:
    client = client_of(stack)
    lines, answers = questions(3)
    batch = ended(client, created(client, "/v1/completions", lines), 60)
    assert batch.request_counts.completed == len(lines) and batch.error_file_id is None
    got = {each["custom_id"]: each["response"]["body"] for each in outputs(client, batch)}
    assert {name: body["choices"][0]["text"] for name, body in got.items()} == answers
    used = sum(body["usage"]["total_tokens"] for body in got.values())
    assert batch.usage.total_tokens == used


def test_embeddings_are_those_of_a_direct_call(stack: Stack) -> None:
    client = client_of(stack)
    lines = [line("a", "/v1/embeddings", model=BASE_ID, input="hello", encoding_format="float")]
    batch = ended(client, created(client, "/v1/embeddings", lines), 60)
    [answer] = outputs(client, batch)
    direct = client.embeddings.create(model=BASE_ID, input="hello", encoding_format="float")
    vector = answer["response"]["body"]["data"][0]["embedding"]
    assert vector == pytest.approx(direct.data[0].embedding, abs=1e-5)


@pytest.fixture
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = start(tmp_path_factory.mktemp("batches") / "state", "--dtype", "float32")
    try:
        running.publish(*ADAPTERS[:4])
        yield running
    finally:
        assert running.stop() == 0


def num_stored(stack: Stack) -> int:
    """Results that lines have."""
    return sum(1 for _ in (stack.state_dir / "objects" / "batches").rglob("results/*/*"))


VICTIMS = (
    "loraplex_services.gateway",
    "loraplex_services.worker.engine.process",
    "loraplex_services.gateway",
    "loraplex_services.worker",
    "loraplex_services.registry",
    "loraplex_services.gateway",
)


def undisturbed(stack: Stack, lines: list[bytes]) -> dict[str, str]:
    """What a request for each line answers while nothing is killed, by custom_id."""
    asked = [json.loads(each) for each in lines]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda each: stack.complete(**each["body"]), asked)
        texts = [answer["choices"][0]["text"] for answer in answers]
    return dict(zip((each["custom_id"] for each in asked), texts, strict=True))


def kill_one_after_the_other(stack: Stack, deadline_s: float) -> None:
    """Kill each victim once the batch has more results than at the last kill."""
    num_seen = 0
    for module in VICTIMS:
        while num_stored(stack) < num_seen + 20:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        eventually(lambda module=module: is_killed(stack, module))  # type: ignore[misc]
        num_seen = num_stored(stack)


def is_killed(stack: Stack, module: str) -> bool:
    """Kill a service if it runs; it may still be on its way back from the last kill."""
    try:
        stack.service(module).kill()
    except (LookupError, psutil.NoSuchProcess):
        return False
    return True


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_services_neither_lose_nor_repeat_nor_change_results(fragile: Stack) -> None:
    client = client_of(fragile)
    lines, answers = questions(150)
    expected = undisturbed(fragile, lines)
    num_right = sum(expected[custom_id] == want for custom_id, want in answers.items())
    assert num_right >= 0.98 * len(answers), "as many as the adapters get right"
    batch = created(client, "/v1/completions", lines)
    deadline_s = time.monotonic() + 800
    kill_one_after_the_other(fragile, deadline_s)
    batch = ended(client, batch, deadline_s - time.monotonic())
    assert batch.status == "completed" and batch.error_file_id is None
    found = outputs(client, batch)
    assert len(found) == len(lines) and batch.request_counts.completed == len(lines)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
    assert texts == expected
    assert list(texts) == list(expected), "in the order of the lines"
