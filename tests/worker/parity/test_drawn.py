"""Drawn bases and adapters generate the tokens of transformers and PEFT.

The listed features prove what somebody thought of. Sizes and fields are drawn here, so that a
combination that nobody listed is served as PEFT computes it, too, or refused by name.
"""

from __future__ import annotations

import json
import random
import warnings
from functools import partial
from pathlib import Path

import pytest

from loraplex.errors import LoraplexError
from loraplex_services.worker.engine.adapter_checks import last_place
from tests.worker.parity.bases import TinyBase
from tests.worker.parity.drawn import INVOCATION, draw_adapter, draw_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

pytestmark = pytest.mark.long

NUM_ADAPTERS, NUM_NEW_TOKENS = 4, 14


def drawn_job(rng: random.Random, base: TinyBase, slot: int, folder: Path | None) -> Job:
    """A prompt for an adapter, or for the base; an activated one is invoked."""
    prompt = [rng.randrange(base.config.vocab_size) for _ in range(rng.randrange(1, 70))]
    config = json.loads((folder / "adapter_config.json").read_text()) if folder else {}
    is_activated = bool(config.get("alora_invocation_tokens"))
    if is_activated:
        place = rng.randrange(len(prompt))
        prompt[place : place + len(INVOCATION)] = INVOCATION
    request = greedy(f"{folder and folder.name} {config}", prompt, NUM_NEW_TOKENS)
    if is_activated:
        request.adapters_from = last_place(prompt, INVOCATION)
    return Job(request, ((slot, 1.0),) if folder else (), rng.randrange(8))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_drawn_is_served_as_peft_computes_it_or_refused_by_name(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    base = draw_base(rng, tmp_path / "base")
    settings = rng.choice([{}, {}, {"attention_backend": "vanilla"}, {"max_model_len": 100}])
    driver = Driver(parity_runner(base.folder, arena_bytes=64 << 20, **settings))
    served: dict[int, Path] = {}
    for slot in range(1, 1 + NUM_ADAPTERS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice on training
            folder = draw_adapter(rng, base, tmp_path / f"adapter-{slot}")
        if folder is None:
            continue
        try:
            driver.load(slot, folder)
        except LoraplexError as error:
            assert error.violations, error
        else:
            served[slot] = folder
    reference = Reference(base, {folder.name: folder for folder in served.values()})
    jobs = [(f, drawn_job(rng, base, slot, f)) for slot, f in [*served.items()] * 2]
    jobs.append((None, drawn_job(rng, base, 0, None)))
    driver.run([job for _, job in jobs], chunk=rng.choice([5, 16, 1000]))
    verdict = Verdict()
    for folder, job in jobs:
        name = folder.name if folder else None
        prompt, ours = job.request.prompt_ids, job.request.output_ids
        tokens = prompt + ours
        verdict.judge(
            len(prompt),
            ours,
            reference.logits(name, tokens, len(prompt)),
            partial(reference.logits64, name, tokens, len(prompt)),
            f"{base.name} {job.request.request_id}",
        )
    verdict.finish()
