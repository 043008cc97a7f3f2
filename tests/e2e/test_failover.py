"""kill -9 of one of two workers under load: no stream fails and every output is as undisturbed."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack, eventually, start

NUM_CLIENTS = 6
MAX_TOKENS = 96
MOST_COMMENTS = 12
"""One is sent in ten seconds without an event."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Stack]:
    """A stack with two workers and some adapters."""
    running = start(tmp_path / "state", "--workers", "2")
    try:
        for folder in ADAPTERS[:4]:
            running.publish(folder)
        yield running
    finally:
        assert running.stop() == 0


def bodies() -> list[dict[str, Any]]:
    """Requests over several adapters and the base, greedy and sampled, all longer than a kill."""
    made = []
    for place, name in enumerate([*(path.name for path in ADAPTERS[:4]), BASE_ID]):
        skill = name if name != BASE_ID else ADAPTERS[0].name
        for number, (prompt, _) in enumerate(held_out(skill, 2, seed=31)):
            sampled = {"temperature": 0.8, "seed": 100 * place + number}
            for sampling in ({"temperature": 0}, sampled):
                made.append({"model": name, "prompt": prompt, "stream": True, **sampling})
    fixed = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return [body | fixed for body in made]


def told(stack: Stack, response: Iterable[bytes]) -> Iterator[str]:
    """Lines of an answer. One that only ever says that it waits fails, with what the services
    say of themselves."""
    num_comments = 0
    for line in response:
        num_comments += line.startswith(b":")
        assert num_comments < MOST_COMMENTS, f"a stream hangs:\n{stack.evidence()}"
        if line.startswith(b"data"):
            num_comments = 0
        yield line.decode().strip()


def stream(stack: Stack, body: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Text and ids of one stream that must end well."""
    request = urllib.request.Request(
        stack.http + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = list(told(stack, response))
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events and events[-1] == "[DONE]", events[-1:]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    ids = tuple(i for choice in choices for i in choice["token_ids"])
    return "".join(choice["text"] for choice in choices), ids


@dataclass
class Load:
    """Clients that ask the same questions again and again."""

    stack: Stack
    expected: list[tuple[str, tuple[int, ...]]]
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    num_done: int = 0

    def client(self, offset: int) -> None:
        asked = bodies()
        number = offset
        while not self.stop.is_set():
            place = number % len(asked)
            try:
                got = stream(self.stack, asked[place])
                if got != self.expected[place]:
                    self.failures.append(f"request {place} came out otherwise")
            except Exception as error:
                self.failures.append(f"request {place}: {type(error).__name__} {error}")
            self.num_done += 1
            number += NUM_CLIENTS


def workers(stack: Stack) -> list[psutil.Process]:
    """The door processes of the workers."""
    children = psutil.Process(stack.process.pid).children(recursive=True)
    return [child for child in children if "services.worker" in child.cmdline()]


def metric(stack: Stack, name: str) -> float:
    """One counter or gauge of the gateway."""
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", stack.get("/metrics")[1], re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def both_ready(stack: Stack) -> bool:
    return metric(stack, "loraplex_gateway_ready_workers") == 2


def kill_under_load(stack: Stack, num_kills: int) -> None:
    """The test itself, for a number of kills."""
    eventually(lambda: both_ready(stack))
    load = Load(stack, [stream(stack, body) for body in bodies()])
    threads = [threading.Thread(target=load.client, args=(place,)) for place in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        for number in range(num_kills):
            done = load.num_done
            eventually(lambda done=done: load.num_done > done + 2)  # type: ignore[misc]
            workers(stack)[number % 2].kill()
            eventually(lambda: not both_ready(stack))
            eventually(lambda: both_ready(stack), timeout_s=120)
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()
    assert load.failures == []
    assert load.num_done > num_kills
    assert metric(stack, "loraplex_gateway_continuations_total") > 0


@pytest.mark.timeout(300)
def test_a_kill_is_hidden(pair: Stack) -> None:
    kill_under_load(pair, 1)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_kills_are_hidden(pair: Stack, part: int) -> None:
    """In ten parts, each of a fresh stack."""
    kill_under_load(pair, 10)
