"""Measures what a KV cache in codes changes: distributions of the demo's base and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from demo.skills import held_out
from demo.tokenizer import BOS_ID
from loraplex.api.output import TokenLogprob
from loraplex.client.divergence import NUM_CANDIDATES, PROBE_TEXTS, divergence
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.runners import parity_runner

DEMO = Path(__file__).parents[3] / "demo"
NUM_TEXTS = 100
"""Of each adapter's skill."""
INTRODUCTION = """
## Keys and values in codes

The demo's base and its adapters, in float32, with the KV cache in codes and in float32. The base
scores the built-in texts of `registry certify`, and each adapter {num_texts} prompts of its skill
with their answers. Divergences are in nats per token; the demo's heads have 32 dimensions.

| `--kv-cache-dtype` | scored by | tokens | mean divergence | largest | same most likely token |
|---|---|---|---|---|---|
"""


def texts_of(adapter: str | None) -> list[list[int]]:
    """Token ids to score."""
    texts = PROBE_TEXTS
    if adapter is not None:
        texts = tuple(prompt + answer for prompt, answer in held_out(adapter, NUM_TEXTS, 0))
    return [[BOS_ID, *text.encode()] for text in texts]


def scored(adapter: str | None, kept: str) -> list[TokenLogprob]:
    """The distributions at all positions but the first of each text."""
    driver = Driver(parity_runner(DEMO / "base", arena_bytes=64 << 20, kv_cache_dtype=kept))
    slots = ()
    if adapter is not None:
        driver.load(1, DEMO / "adapters" / adapter)
        slots = ((1, 1.0),)
    jobs = [
        Job(greedy(f"{i}", ids, 1, prompt_logprobs=NUM_CANDIDATES), slots)
        for i, ids in enumerate(texts_of(adapter))
    ]
    driver.run(jobs, chunk=64)
    return [entry for job in jobs for row in job.samples for entry in row.prompt_logprobs.scored()]


def section() -> Iterator[str]:
    """Lines of the page."""
    yield from INTRODUCTION.format(num_texts=NUM_TEXTS).splitlines()
    adapters = sorted(path.name for path in (DEMO / "adapters").iterdir())
    expected = {adapter: scored(adapter, "auto") for adapter in (None, *adapters)}
    for kept in KV_CODES:
        for adapter, reference in expected.items():
            found = divergence(reference, scored(adapter, kept))
            facts = (
                str(found.num_tokens),
                f"{found.mean_kl:.1e}",
                f"{found.max_kl:.1e}",
                f"{found.top1_agreement:.2%}",
            )
            yield f"| `{kept}` | {adapter or 'the base'} | {' | '.join(facts)} |"
