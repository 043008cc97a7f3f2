"""`make demo`: publishes the bundled adapters, decodes them in one batch and checks every answer.

Everything goes through the public interfaces: `loraplex up`, `registry upload`, the gateway's API.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.skills import SKILLS, held_out
from demo.stack import Stack, StackFailed, running_stack
from loraplex.api.sampling import Sampling
from loraplex.client.inference_client import InferenceClient, collect
from loraplex.errors import LoraplexError

ROOT = Path(__file__).resolve().parent
STATE_DIR = ROOT.parent / ".demo"
MODEL_NAME = "loraplex-demo"
NUM_PROMPTS = 8
"""Number of prompts for each adapter."""
SEED = 20
GREEDY = Sampling(max_tokens=32, temperature=0.0)
NUM_LOOKS, LOOK_S = 15, 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """One request with its right answer."""

    adapter: str
    prompt: str
    expected: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of a request, and its times."""

    question: Question
    output: str
    first_token_s: float
    total_s: float

    @property
    def is_right(self) -> bool:
        """Exact match."""
        return self.output == self.question.expected


def adapter_folders() -> list[Path]:
    """The folders of the bundled adapters."""
    return sorted(path for path in (ROOT / "adapters").iterdir() if path.is_dir())


def questions(adapters: Sequence[str]) -> list[Question]:
    """The same unseen prompts for every adapter, interleaved, so that a mix-up cannot be right."""
    drawn = {name: held_out(name, NUM_PROMPTS, SEED) for name in adapters}
    return [Question(name, *drawn[name][i]) for i in range(NUM_PROMPTS) for name in adapters]


def publish(folder: Path, registry: str) -> None:
    """Run `registry upload` as a shell would. Raises StackFailed with its output."""
    command = [
        *(sys.executable, "-m", "loraplex.cli.registry", "upload", str(folder)),
        *("--name", folder.name, "--registry", registry),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise StackFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    print(done.stdout.strip())


async def ask(client: InferenceClient, question: Question) -> Answer:
    """Stream one answer."""
    started_s = time.perf_counter()
    first_s = 0.0
    chunks = []
    async for chunk in client.generate(question.adapter, question.prompt, GREEDY):
        first_s = first_s or time.perf_counter() - started_s
        chunks.append(chunk)
    return Answer(question, collect(chunks).text, first_s, time.perf_counter() - started_s)


async def ask_all(stack: Stack, batch: Sequence[Question]) -> tuple[list[Answer], int]:
    """Send all requests at once; returns the answers and the largest number of adapters in one
    engine step.

    The adapters are loaded first. On a slow machine, the first ones would otherwise have answered
    before the last one is ready.
    """
    adapters = {question.adapter for question in batch}
    async with InferenceClient(stack.grpc) as client:
        await asyncio.gather(*(client.fetch(adapter) for adapter in adapters))
        answers = await asyncio.gather(*(ask(client, question) for question in batch))
        return list(answers), await most_distinct(client, len(adapters))


async def most_distinct(client: InferenceClient, num_adapters: int) -> int:
    """The largest number of adapters in one step, which workers report once a second."""
    num_distinct = 0
    for _ in range(NUM_LOOKS):
        status = await client.status()
        num_distinct = max(worker.load.max_distinct_adapters for worker in status.workers)
        if num_distinct == num_adapters:
            break
        await asyncio.sleep(LOOK_S)
    return num_distinct


def print_table(answers: Sequence[Answer]) -> None:
    """Print one line for each answer, in the order of the adapters."""
    print(f"\n{'ADAPTER':10} {'PROMPT':14} {'OUTPUT':24} {'':6} {'FIRST':>7} {'TOTAL':>7}")
    for answer in sorted(answers, key=lambda answer: answer.question.adapter):
        question = answer.question
        verdict = "right" if answer.is_right else "WRONG"
        print(
            f"{question.adapter:10} {question.prompt:14} {answer.output!r:24} {verdict:6} "
            f"{answer.first_token_s * 1000:4.0f} ms {answer.total_s * 1000:4.0f} ms"
        )
        if not answer.is_right:
            print(f"{'':26}expected {question.expected!r}")


def main() -> int:
    """Run the demo; returns the exit code."""
    folders = adapter_folders()
    unknown = [folder.name for folder in folders if folder.name not in SKILLS]
    if unknown or not folders:
        print(f"demo: adapters without a known skill: {', '.join(unknown) or 'none at all'}")
        return 1
    batch = questions([folder.name for folder in folders])
    print("starting registry, gateway and worker ...", flush=True)
    try:
        with running_stack(ROOT / "base", MODEL_NAME, STATE_DIR) as stack:
            for folder in folders:
                publish(folder, stack.registry)
            answers, num_distinct = asyncio.run(ask_all(stack, batch))
    except (StackFailed, LoraplexError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print_table(answers)
    num_correct = sum(answer.is_right for answer in answers)
    print(f"\ndemo: largest step held {num_distinct} distinct adapters")
    print(f"demo: {len(answers)} requests, {len(folders)} adapters, {num_correct} correct")
    return 0 if num_correct == len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
