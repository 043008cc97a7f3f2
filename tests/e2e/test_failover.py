"""kill -9 of one of two workers under load: no stream fails and every output is as undisturbed."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE, BASE_ID, Stack, eventually, start
from tests.processes import processes_running

NUM_CLIENTS = 6
MOST_MISSES = 3
CONTINUATIONS = "loraplex_gateway_continuations_total"
MAX_TOKENS = 96
LEAST_REST = 4
"""Fewer tokens may look like others moved by one, by chance."""
NUM_UNDISTURBED = 150
MOST_COMMENTS = 12
"""One is sent in ten seconds without an event."""


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack with two workers and some adapters; the parameter adds flags."""
    stack = start(tmp_path / "state", "--workers", "2", *getattr(request, "param", ()))
    try:
        stack.publish(*ADAPTERS[:4])
        yield stack
    finally:
        assert stack.stop() == 0


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


def lines_of(stack: Stack, response: Iterable[bytes]) -> Iterator[str]:
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
        lines = list(lines_of(stack, response))
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events and events[-1] == "[DONE]", events[-1:]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    ids = tuple(i for choice in choices for i in choice["token_ids"])
    return "".join(choice["text"] for choice in choices), ids


Answer = tuple[str, tuple[int, ...]]
Judge = Callable[[Answer, Answer], str]
"""What is wrong with an answer compared with the undisturbed one; "" = nothing."""


def the_same(got: Answer, expected: Answer) -> str:
    """float32: the very same tokens."""
    return "" if got == expected else "came out otherwise"


@dataclass
class Load:
    """Clients that ask the same questions again and again."""

    stack: Stack
    expected: list[Answer]
    judge: Judge = the_same
    asked: list[dict[str, Any]] = field(default_factory=bodies)
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    num_done: int = 0

    def client(self, offset: int) -> None:
        number = offset
        while not self.stop.is_set():
            place = number % len(self.asked)
            try:
                got = stream(self.stack, self.asked[place])
                if fault := self.judge(got, self.expected[place]):
                    self.failures.append(f"request {place} {fault}")
            except Exception as error:
                self.failures.append(f"request {place}: {type(error).__name__} {error}")
            self.num_done += 1
            number += NUM_CLIENTS


def workers(stack: Stack) -> list[psutil.Process]:
    """The API server processes of the workers."""
    return list(processes_running(stack.process.pid, "loraplex_services.worker"))


def kill_worker(stack: Stack, number: int) -> None:
    """One worker and the other in turn."""
    workers(stack)[number % 2].kill()


def metric(stack: Stack, name: str) -> float:
    """One counter or gauge of the gateway; 0 until it has a value."""
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", stack.get("/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def both_ready(stack: Stack) -> bool:
    return metric(stack, "loraplex_gateway_ready_workers") == 2


@contextmanager
def running(load: Load) -> Iterator[None]:
    """The clients, until the end of the block."""
    load.stop.clear()
    threads = [threading.Thread(target=load.client, args=(place,)) for place in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def kill_under_load(
    load: Load, num_kills: int, kill: Callable[[Stack, int], None] = kill_worker
) -> None:
    """Kill the workers one after the other, each while the other serves and streams run.

    A worker may be without streams when it is killed, so kills go on until one has hit some.

    Args:
        kill: what is killed; it gets the number of the kill.
    """
    stack = load.stack
    with running(load):
        for number in range(num_kills + MOST_MISSES):
            if number >= num_kills and metric(stack, CONTINUATIONS):
                break
            done = load.num_done
            eventually(lambda done=done: load.num_done > done + 2)  # type: ignore[misc]
            kill(stack, number)
            eventually(lambda: not both_ready(stack))
            eventually(lambda: both_ready(stack), timeout_s=600)
    assert load.failures == []
    assert load.num_done > num_kills
    assert metric(stack, CONTINUATIONS) > 0


def undisturbed(stack: Stack, asked: Sequence[dict[str, Any]] | None = None) -> list[Answer]:
    """The answers of both workers while nothing happens."""
    eventually(lambda: both_ready(stack))
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(lambda body: stream(stack, body), asked or bodies()))


@pytest.mark.timeout(300)
def test_a_kill_is_hidden(pair: Stack) -> None:
    kill_under_load(Load(pair, undisturbed(pair)), 1)


RANK_MODULE = "loraplex_services.worker.runner.parallel.rank_process"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pair", [("--tensor-parallel", "2")], indirect=True)
def test_a_killed_rank_is_hidden(pair: Stack) -> None:
    """Each worker is two ranks; the one that dies takes its worker's streams along."""
    kill_under_load(Load(pair, undisturbed(pair)), 1, lambda *_: pair.service(RANK_MODULE).kill())


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_kills_are_hidden(pair: Stack, part: int) -> None:
    """In ten parts, each of a fresh stack."""
    kill_under_load(Load(pair, undisturbed(pair)), 10)


@dataclass
class Divergences:
    """bfloat16: another batch rounds otherwise, so answers may part from the undisturbed ones. None
    may lack a token or have one twice."""

    tokenizer: Tokenizer
    num_seen: int = 0
    num_parted: int = 0

    def judge(self, got: Answer, expected: Answer) -> str:
        """Counts answers that part; names those that are not seamless."""
        self.num_seen += 1
        text, ids = got
        if len(ids) != MAX_TOKENS:
            return f"has {len(ids)} tokens"
        if text != self.tokenizer.decode(list(ids)):
            return "has text that is not that of its tokens"
        if ids == expected[1]:
            return ""
        self.num_parted += 1
        at = next(
            n for n, pair in enumerate(zip(ids, expected[1], strict=True)) if pair[0] != pair[1]
        )
        rest, meant = ids[at:], expected[1][at:]
        if len(rest) > LEAST_REST and (rest[:-1] == meant[1:] or rest[1:] == meant[:-1]):
            return f"lacks token {at} or has it twice"
        return ""

    def take(self) -> str:
        """So many parted since the last call."""
        report = f"{self.num_parted} of {self.num_seen} answers part from the undisturbed ones"
        self.num_seen = self.num_parted = 0
        return report


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("pair", [("--dtype", "bfloat16")], indirect=True)
def test_kills_are_seamless_in_bfloat16(pair: Stack) -> None:
    """Prints how many answers part under the same load, without kills and with ten of them."""
    found = Divergences(Tokenizer.from_file(str(BASE / "tokenizer.json")))
    load = Load(pair, undisturbed(pair), judge=found.judge)
    with running(load):
        eventually(lambda: load.num_done >= NUM_UNDISTURBED, timeout_s=600)
    assert load.failures == []
    print(f"\nno kills: {found.take()}")
    kill_under_load(load, 10)
    continued = metric(pair, "loraplex_gateway_continuations_total")
    print(f"ten kills: {found.take()}, {continued:g} streams continued")
