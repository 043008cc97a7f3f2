"""One base with all its adapters in one continuous batch, judged against transformers + peft."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loraplex_services.worker.engine.adapter_checks import last_occurrence
from tests.worker.parity.adapters import (
    ACTIVATED_FEATURES,
    FEATURES,
    LIBRARY_FEATURES,
    RESIZED,
    features_of,
    make_adapter,
)
from tests.worker.parity.bases import LIBRARY_BASES, TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

MAX_LOGPROB_ERROR = 1e-4
REFUSED = {
    "phi": ("dora", "lm-head", "saved-tables", "added-tokens"),  # PEFT writes its head's bias
    "gpt-neox": ("saved-tables", "added-tokens"),  # PEFT leaves its head out of the file
    "opt": ("activated",),  # PEFT does not know rows without a batch
    "llama4": ("activated",),  # the same
    "llama4-dense": ("activated",),
    "minicpm3": ("activated",),
    "youtu": ("activated",),
    "axk1": ("activated",),
    # PEFT takes experts for linears, some of which are identities
    "longcat": ("rank-8-all-linear", "dora", "patterns", "activated"),
    "gpt-oss": ("experts", "experts-down"),
    "gemma4-all": ("experts", "experts-down", "experts-all-linear", "expert-linears"),
    "phimoe": ("experts-all-linear",),  # PEFT takes its router, which returns a tuple, for a linear
}
"""Features that PEFT cannot write for a base, or that are refused of it."""
NamedJob = tuple[str | None, Job]
"""(feature of the job's adapter or None for the base, job)."""


@dataclass(frozen=True)
class Stage:
    """A base, its adapters in slots, and the reference."""

    base: TinyBase
    driver: Driver
    reference: Reference
    slots: dict[str, int]


def set_stage(base_name: str, root: Path, **settings: Any) -> Stage:
    """Make the base and one adapter per feature, load everything."""
    base = make_base(base_name, root / "base")
    return stage_of(base, features_of(base), root, **settings)


def set_library_stage(base_name: str, root: Path) -> Stage:
    """The same through the transformers library, with the features that are served there."""
    base = make_base(base_name, root / "base")
    refused = REFUSED.get(base_name, ())
    features = [f for f in LIBRARY_FEATURES if f in features_of(base) and f not in refused]
    model_impl = "auto" if base_name in LIBRARY_BASES else "transformers"
    return stage_of(base, features, root, model_impl=model_impl)


def stage_of(base: TinyBase, features: Sequence[str], root: Path, **settings: Any) -> Stage:
    """A base that is on disk, with one adapter per feature."""
    adapters = {name: make_adapter(base, name, root / name) for name in features}
    runner = parity_runner(base.folder, arena_bytes=64 << 20, overlap="on", **settings)
    driver = Driver(runner)
    slots = {name: 3 * i + 1 for i, name in enumerate(adapters)}
    for name, slot in slots.items():
        driver.load(slot, adapters[name])
    return Stage(base, driver, Reference(base, adapters), slots)


def random_prompt(rng: random.Random) -> list[int]:
    """1 to 69 tokens."""
    return [rng.randrange(300) for _ in range(rng.randrange(1, 70))]


def make_jobs(stage: Stage, seed: int, num_new_tokens: int, *, stagger: bool) -> list[NamedJob]:
    """Every adapter once, two of them twice, two requests of the base; in random order."""
    rng = random.Random(seed)
    names = [*stage.slots, *rng.sample(sorted(stage.slots), 2), None, None]
    rng.shuffle(names)
    jobs: list[NamedJob] = []
    for i, name in enumerate(names):
        slots = () if name is None else ((stage.slots[name], 1.0),)
        prompt = random_prompt(rng)
        if name in RESIZED:
            prompt[::3] = [rng.randrange(RESIZED[name]) for _ in prompt[::3]]
        if name in ACTIVATED_FEATURES:  # invoked twice, once, or not at all
            invocation = FEATURES[name]["alora_invocation_tokens"]
            for index in rng.sample(range(len(prompt)), min(2, len(prompt))):
                prompt[index : index + len(invocation)] = invocation
        request = greedy(f"{i}-{name}", prompt, num_new_tokens, logprobs=0)
        if name in ACTIVATED_FEATURES:
            request.adapters_from = last_occurrence(prompt, invocation)
        arrival_step = rng.randrange(12)
        jobs.append((name, Job(request, slots, arrival_step if stagger else 0)))
    return jobs


def judge(stage: Stage, jobs: list[NamedJob]) -> Iterator[tuple[str | None, Verdict, float]]:
    """For each finished job: feature, its verdict, and its largest logprob error at positions where
    float32 can be that exact.

    Raises:
        AssertionError: a token differs by more than a near tie.
    """
    for name, job in jobs:
        prompt, ours = job.request.prompt_ids, job.request.output_ids
        tokens = prompt + ours
        logits = stage.reference.logits(name, tokens, len(prompt))
        verdict = Verdict()
        verdict.judge(
            len(prompt),
            ours,
            logits,
            partial(stage.reference.logits64, name, tokens, len(prompt)),
            job.request.request_id,
        )
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found = [s.logprobs for s in job.samples if s.logprobs is not None]
        errors = [
            abs(entry.logprob - row[entry.token_id].item())
            for row, entry in zip(expected, found, strict=True)
        ]
        if max(errors) >= MAX_LOGPROB_ERROR:
            chosen = [entry.token_id for entry in found]
            limits = stage.reference.rounding_errors(name, tokens, len(prompt), chosen)
            pairs = list(zip(errors, limits, strict=True))
            errors = [error for error, limit in pairs if not _is_sensitive(error, limit)]
            verdict.num_sensitive += len(pairs) - len(errors)
        yield name, verdict, max(errors, default=0.0)


def _is_sensitive(error: float, limit: float) -> bool:
    """Whether float32 cannot be more exact, as the reference moves by `limit` itself."""
    return min(error, limit) >= MAX_LOGPROB_ERROR > error - limit


def check_mixed_batch(
    stage: Stage, near_ties: Verdict, num_new_tokens: int, *, seed: int = 1
) -> None:
    """Run all adapters in one batch and compare its tokens and logprobs with PEFT's."""
    jobs = make_jobs(stage, seed, num_new_tokens, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19, overlaps=True)
    for name, verdict, logprob_error in judge(stage, jobs):
        near_ties.add(verdict)
        assert logprob_error < MAX_LOGPROB_ERROR, name


def check_sampled_tokens(stage: Stage) -> None:
    """Compare the sampled tokens of ranks with those of one rank. Some rows of a batch have their
    logits gathered, for their sampling or for the head of their adapter, and some have not."""
    rng = random.Random(5)
    prompts = [random_prompt(rng) for _ in range(12)]
    alone = Driver(parity_runner(stage.base.folder, arena_bytes=32 << 20))
    names = [name for name in ("rslora", "lm-head", "added-tokens") if name in stage.slots]
    for name in names:
        alone.load(stage.slots[name], stage.base.folder.parent / name)
    slots = [(), *(((stage.slots[name], 1.0),) for name in names)]
    outputs = []
    for driver in (stage.driver, alone):
        jobs = []
        for i, prompt in enumerate(prompts):
            changes = {"top_p": 0.9, "top_k": 40} if i % 3 == 0 else {}
            request = greedy(f"r{i}", prompt, 12, temperature=0.5 * (i % 5), seed=11 + i, **changes)
            jobs.append(Job(request, slots[i % len(slots)], i % 5))
        outputs.append(driver.run(jobs))
    assert outputs[0] == outputs[1]
