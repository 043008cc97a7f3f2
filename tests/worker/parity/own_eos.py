"""Adapters whose generation_config.json ends their output, compared with transformers'
`generate`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from loraplex.adapter_format import read_folder
from loraplex_services.worker.runner.steps import InlineExecutor
from tests.worker.engine_stage import A, B, Stage, submit
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

FEATURES = {A: "rank-4-attention", B: "added-tokens"}
"""By digest; the second has tokens that the base lacks."""
EOS_IDS = {A: [*range(0, 300, 12)], B: [*range(5, 300, 24), *range(311, 320)]}
NUM_PROMPTS = 5
Outputs = dict[str, list[int]]


def outputs_of_both(base: TinyBase, root: Path, num_new_tokens: int) -> tuple[Outputs, Outputs]:
    """Of five prompts to the base and each adapter: ours in one batch, and PEFT's, by request."""
    for digest, feature in FEATURES.items():
        make_adapter(base, feature, root / digest)
        text = json.dumps({"eos_token_id": EOS_IDS[digest], "temperature": 0.3})
        (root / digest / "generation_config.json").write_text(text)
        published = read_folder(root / digest).config_bytes  # as the registry hands it to workers
        (root / digest / "adapter_config.json").write_bytes(published)
    executors = (InlineExecutor(), InlineExecutor())
    runner = parity_runner(base.folder, arena_bytes=16 << 20, executors=executors)
    stage = Stage(runner, root)
    digests = [(), *((digest,) for digest in FEATURES)]
    requests = [
        submit(f"{FEATURES[own[0]] if own else 'base'}-{i}", *own, seed=i, ignore_eos=False,
               max_tokens=num_new_tokens)
        for own in digests
        for i in range(NUM_PROMPTS)
    ]  # fmt: skip
    ours = stage.run(*requests, *stage.fetched(A, B))
    reference = Reference(base, {feature: root / digest for digest, feature in FEATURES.items()})
    theirs: Outputs = {}
    for request in (command.request for command in requests):
        own = next(iter(request.adapters.digests), None)
        model = reference.model(FEATURES[own] if own else None)
        ids = torch.tensor([list(request.prompt_ids)])
        complete = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            eos_token_id=EOS_IDS[own] if own else base.model.config.eos_token_id,
        )
        theirs[request.request_id] = complete[0, ids.shape[1] :].tolist()
    return ours, theirs
