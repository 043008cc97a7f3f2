"""Loss of accuracy with int8 adapters, on the demo's adapters.

    python -m benchmarks run cpu.int8_adapters

Uses the demo's base and its trained adapters on a CPU, in float32. Held-out questions with their
right answers are scored by each adapter as published and by the same adapter with
LORAPLEX_LORA_DTYPE=int8. Prints how far log probabilities of their tokens move, how far the
adapter itself moves them from the base, and the bytes of both in the arena. Tokens of questions are
hard to predict and move more; those of answers are almost certain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.machine import options_of, write_results
from demo.skills import held_out
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.steps import InlineExecutor
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import load_adapter

DEMO = Path(__file__).parents[2] / "demo"
ARENA_BYTES = 64 << 20
Question = tuple[list[int], int]
"""Token ids of prompt and answer, and the number of tokens of the prompt."""


@dataclass(frozen=True)
class Served:
    """A runner with one adapter in slot 0."""

    runner: TorchRunner
    num_bytes: int

    def logprobs(
        self, questions: Sequence[Question], *, bare: bool = False
    ) -> tuple[list[float], list[float]]:
        """Logprobs of the tokens of all prompts, except the first of each, and of all answers."""
        prompts, answers = [], []
        for tokens, num_prompt in questions:
            scored = self._score(tokens, bare)
            prompts += scored[: num_prompt - 1]
            answers += scored[num_prompt - 1 :]
        return prompts, answers

    def _score(self, tokens: list[int], bare: bool) -> list[float]:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0)
        request = Request("q", tokens, sampling)
        per_group = -(-len(tokens) // self.runner.tokens_per_block)
        free: Iterator[int] = iter(range(self.runner.arena_blocks - 1, 0, -1))
        groups = self.runner.kv_group_windows
        request.block_tables = [[next(free) for _ in range(per_group)] for _ in groups]
        slots = () if bare else ((0, 1.0),)
        plan = StepPlan(0, (PlannedRow(request, 0, len(tokens), True, slots),))
        [row] = self.runner.launch(plan).result()
        return [entry.logprob for entry in row.prompt_logprobs.entries()[1:]]


def serve(folder: Path, lora_dtype: str) -> Served:
    """The demo's base with the adapter of a folder."""
    runner = build_runner(
        DEMO / "base",
        device="cpu",
        dtype="float32",
        arena_bytes=ARENA_BYTES,
        lora_dtype=lora_dtype,
        executors=(InlineExecutor(), InlineExecutor()),
    )
    load_adapter(runner, 0, folder, range)
    table = runner._adapters.table.values()
    return Served(runner, sum(tile.data.nbytes for d in table for tile in (*d.a, *d.b)))


def questions_of(name: str, tokenizer: PreTrainedTokenizerFast, count: int) -> list[Question]:
    """Held-out ones of a skill."""
    found = []
    for prompt, answer in held_out(name, count, seed=7):
        prompt_ids = tokenizer(prompt).input_ids
        answer_ids = tokenizer(answer, add_special_tokens=False).input_ids
        found.append(([*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids)))
    return found


def compare(name: str, tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, float | str]:
    """One row of the table."""
    questions = questions_of(name, tokenizer, count)
    folder = DEMO / "adapters" / name
    exact, rounded = serve(folder, "auto"), serve(folder, "int8")
    published = exact.logprobs(questions)
    errors = _differences(published, rounded.logprobs(questions))
    effects = _differences(published, exact.logprobs(questions, bare=True))
    row: dict[str, float | str] = {"adapter": name}
    for part, error, effect in zip(("prompts", "answers"), errors, effects, strict=True):
        row[f"{part}_tokens"] = len(error)
        row[f"{part}_mean_error"] = statistics.mean(error)
        row[f"{part}_max_error"] = max(error)
        row[f"{part}_mean_effect_of_adapter"] = statistics.mean(effect)
    return row | {"bytes_over_published": rounded.num_bytes / exact.num_bytes}


def _differences(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> list[list[float]]:
    return [
        [abs(x - y) for x, y in zip(*parts, strict=True)] for parts in zip(left, right, strict=True)
    ]


def summary_of(rows: Sequence[dict[str, float | str]]) -> dict[str, float]:
    """The errors over all adapters."""
    found = {}
    for part in ("prompts", "answers"):
        weights = [float(row[f"{part}_tokens"]) for row in rows]
        errors = [float(row[f"{part}_mean_error"]) for row in rows]
        total = sum(w * e for w, e in zip(weights, errors, strict=True))
        found[f"{part}_mean_error"] = total / sum(weights)
        found[f"{part}_max_error"] = max(float(row[f"{part}_max_error"]) for row in rows)
    return found


def main() -> None:
    """Print a table; write `results/<machine>/int8_adapters.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--questions", type=int, default=64, help="of each adapter's skill (64)")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    names = sorted(folder.name for folder in (DEMO / "adapters").iterdir())
    rows = [compare(name, tokenizer, args.questions) for name in names]
    for row in rows:
        print("  ".join(f"{v:.5f}" if isinstance(v, float) else f"{v!s:>12}" for v in row.values()))
    summary = summary_of(rows)
    print(summary)
    write_results("int8_adapters", {**summary, "rows": rows})


if __name__ == "__main__":
    main()
