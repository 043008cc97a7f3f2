"""What goes on while faults happen: clients with questions that have one right answer, and a
publisher that never repeats itself."""

from __future__ import annotations

import enum
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from demo.skills import SKILLS, held_out
from loraplex import BlockingRegistry, Credentials, Publication
from loraplex.errors import LoraplexError
from tests.e2e.stack import DEMO
from tests.faults.deployment import Deployment

SERVED = ("reverse", "upper", "sort", "rot13")
"""Adapters that are published, and have answered, before any fault."""
PUBLISHED = ("next", "twice", "stutter", "vowels")
"""Adapters that are published again and again, with other bytes each time."""
NUM_CLIENTS = 4
NUM_QUESTIONS = 8
MAX_TOKENS = 24
HANG_S = 60.0
"""A request without an end after this long hangs."""
_PAUSE_S = 0.3


class Outcome(enum.Enum):
    """How a request or a publication ended."""

    RIGHT = "right"
    REFUSED = "refused"
    """An error with a status and a reason before the first token."""
    CUT = "cut"
    """An error event in the stream, after the first token."""
    UNKNOWN = "unknown"
    """404 for an adapter whose publication was acknowledged."""
    WRONG = "wrong"
    HUNG = "hung"
    DROPPED = "dropped"
    """The connection ended without an answer or an error."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request with its right answer."""

    model: str
    prompt: str
    answer: str


def questions_for(skill: str, model: str = "") -> list[Question]:
    """Held-out questions of a demo adapter, served under `model` or its own name."""
    return [Question(model or skill, *pair) for pair in held_out(skill, NUM_QUESTIONS, seed=41)]


def ask(deployment: Deployment, question: Question) -> tuple[Outcome, str]:
    """Stream one answer; returns the outcome and what was said about it."""
    body = {"model": question.model, "prompt": question.prompt, "max_tokens": MAX_TOKENS}
    request = urllib.request.Request(
        f"{deployment.http}/v1/completions",
        data=json.dumps({**body, "temperature": 0, "stream": True}).encode(),
        headers={"content-type": "application/json"},
    )
    begin_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as response:
            lines = [line.decode().strip() for line in response]
    except urllib.error.HTTPError as error:
        said = error.read().decode()
        return (Outcome.UNKNOWN if error.code == 404 else Outcome.REFUSED), f"{error.code} {said}"
    except (OSError, urllib.error.URLError) as error:
        late = time.monotonic() - begin_s >= HANG_S
        return (Outcome.HUNG if late else Outcome.DROPPED), repr(error)
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return judge(events, question)


def judge(events: list[str], question: Question) -> tuple[Outcome, str]:
    """The outcome of a stream that ended."""
    if not events or events[-1] != "[DONE]":
        last = events[-1] if events else ""
        return (Outcome.CUT if '"error"' in last else Outcome.DROPPED), last
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    if text == question.answer:
        return Outcome.RIGHT, ""
    return Outcome.WRONG, f"{question}: {text!r}"


@dataclass
class Record:
    """What happened to one kind of work."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    said: dict[Outcome, str] = field(default_factory=dict)
    """One message of each outcome."""
    slowest_s: float = 0.0

    def take(self, outcome: Outcome, said: str, took_s: float) -> None:
        """Count one."""
        self.outcomes[outcome] += 1
        self.said.setdefault(outcome, said[:500])
        self.slowest_s = max(self.slowest_s, took_s)


@dataclass
class Traffic:
    """Clients and a publisher of one deployment, and what became of their work."""

    deployment: Deployment
    folder: Path
    asked: Record = field(default_factory=Record)
    """Requests for adapters that answered before the fault."""
    fresh: Record = field(default_factory=Record)
    """First requests for adapters published during the fault."""
    published: Record = field(default_factory=Record)
    acknowledged: list[Question] = field(default_factory=list)
    """A question for each acknowledged publication."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _number: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work until the end of the block. A request that has begun is waited for."""
        self._stop.clear()
        works: list[Callable[[], None]] = [lambda n=n: self._client(n) for n in range(NUM_CLIENTS)]  # type: ignore[misc]
        threads = [threading.Thread(target=work) for work in [*works, self._publisher]]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _client(self, number: int) -> None:
        questions = [question for skill in SERVED for question in questions_for(skill)]
        while not self._stop.is_set():
            self._ask(questions[number % len(questions)], self.asked)
            number += NUM_CLIENTS + 1

    def _ask(self, question: Question, record: Record) -> Outcome:
        begin_s = time.monotonic()
        outcome, said = ask(self.deployment, question)
        record.take(outcome, said, time.monotonic() - begin_s)
        if outcome is not Outcome.RIGHT:
            time.sleep(_PAUSE_S)
        return outcome

    def _publisher(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            question = self.publish()
            if question is not None:
                self._ask(question, self.fresh)

    def publish(self) -> Question | None:
        """Publish an adapter that nobody has seen; returns a question for it if acknowledged."""
        self._number += 1
        skill = PUBLISHED[self._number % len(PUBLISHED)]
        name = f"{self.folder.name}-{self._number}"
        variant(skill, self._number, self.folder / name)
        begin_s = time.monotonic()
        try:
            with BlockingRegistry(self.deployment.registry, Credentials()) as registry:
                registry.upload(self.folder / name, Publication(name))
        except LoraplexError as error:
            said = f"{type(error).__name__} {error.reason}: {error.message}"
            self.published.take(Outcome.REFUSED, said, time.monotonic() - begin_s)
            return None
        self.published.take(Outcome.RIGHT, "", time.monotonic() - begin_s)
        questions = questions_for(skill, name)
        question = questions[self._number % len(questions)]
        self.acknowledged.append(question)
        return question

    def lost(self) -> list[str]:
        """Acknowledged publications that do not answer rightly now."""
        found = []
        for question in self.acknowledged:
            outcome, said = ask(self.deployment, question)
            if outcome is not Outcome.RIGHT:
                found.append(f"{question.model}: {outcome.value} {said}")
        return found


def variant(skill: str, number: int, folder: Path) -> None:
    """Write a demo adapter with other bytes and the very same products: one A is multiplied, and
    its B divided, by a power of two for each bit of `number`."""
    source = DEMO / "adapters" / skill
    tensors = load_file(source / "adapter_model.safetensors")
    names = sorted(name for name in tensors if "lora_A" in name)
    for index, name in enumerate(names[: number.bit_length()]):
        if number >> index & 1:
            other = name.replace("lora_A", "lora_B")
            tensors[name] = tensors[name] * np.asarray(2, tensors[name].dtype)
            tensors[other] = tensors[other] * np.asarray(0.5, tensors[other].dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = (source / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config)


assert set(SERVED + PUBLISHED) <= set(SKILLS)
