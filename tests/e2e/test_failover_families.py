"""kill -9 of a worker whose base has recurrent layers, or layers that read the keys of others.

What such a worker keeps of a request is more than keys and values. Nothing of it reaches the other
worker: that one computes it again from the prompt and the tokens so far.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import stack as stacks
from tests.e2e.stack import BASE_ID
from tests.e2e.test_any_base import save_tokenizer
from tests.e2e.test_failover import Load, kill_under_load, undisturbed
from tests.worker.parity.adapters import FEATURES, make_adapter
from tests.worker.parity.bases import make_base

pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]

NUM_KILLS = 6
PROMPT_TOKENS = 90
ACTIVATED = {"qwen3.5": "delta-nets-activated", "gemma4": "activated"}
PLAIN = {"qwen3.5": "delta-nets", "gemma4": "rank-8-all-linear"}


def bodies(activated: str, plain: str) -> list[dict[str, Any]]:
    """The base and two adapters, greedy and sampled; one is invoked in the middle of prompts."""
    made, rng = [], random.Random(5)
    for name in (BASE_ID, plain, activated, activated):
        for number in range(2):
            prompt = [rng.randrange(300) for _ in range(PROMPT_TOKENS)]
            if name == activated:
                prompt[40:43] = FEATURES[name]["alora_invocation_tokens"]  # type: ignore[call-overload]
            for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": number}):
                made.append({"model": name, "prompt": prompt, **sampling})
    fixed = {"max_tokens": 300, "ignore_eos": True, "return_token_ids": True, "stream": True}
    return [body | fixed for body in made]


@pytest.mark.parametrize("family", ACTIVATED)
def test_kills_change_no_token(family: str, tmp_path: Path) -> None:
    base = make_base(family, tmp_path / "base")
    save_tokenizer(base.folder)
    names = ACTIVATED[family], PLAIN[family]
    flags = ("--dtype", "float32", "--workers", "2")
    stack = stacks.start(tmp_path / "state", *flags, model=base.folder)
    try:
        for name in names:
            stack.publish(make_adapter(base, name, tmp_path / name), name=name)
        asked = bodies(*names)
        expected = undisturbed(stack, asked)
        assert len({ids for _, ids in expected}) == len(expected), "every request differs"
        kill_under_load(Load(stack, expected, asked=asked), NUM_KILLS)
    finally:
        assert stack.stop() == 0
