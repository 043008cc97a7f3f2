"""Batches on a real stack, with the official client, and with gateways that are killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack, start

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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_gateways_neither_lose_nor_repeat_results(fragile: Stack) -> None:
    client = client_of(fragile)
    lines, answers = questions(150)
    batch = created(client, "/v1/completions", lines)
    deadline_s = time.monotonic() + 540
    num_seen = 0
    for _ in range(3):
        while num_stored(fragile) < num_seen + 20:
            assert time.monotonic() < deadline_s and num_seen < len(lines) - 100
            time.sleep(0.01)
        fragile.service("loraplex_services.gateway").kill()
        num_seen = num_stored(fragile)
    batch = ended(client, batch, deadline_s - time.monotonic())
    assert batch.status == "completed" and batch.error_file_id is None
    found = outputs(client, batch)
    assert len(found) == len(lines) and batch.request_counts.completed == len(lines)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
    num_right = sum(texts[custom_id] == want for custom_id, want in answers.items())
    assert num_right >= 0.98 * len(answers), "as many as the adapters get right"
    assert [each["custom_id"] for each in found] == list(answers), "in the order of the lines"
