"""Adapters with rotary embeddings of their own in one batch, and bases whose config has them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from loraplex.adapter_format.rope_scaling import read
from loraplex_services.worker.types.own_rope import own_ropes, switch_len_of
from loraplex_services.worker.types.request import OwnRope
from tests.worker.parity.adapters import EXPERT_FAMILIES, make_adapter
from tests.worker.parity.bases import TinyBase
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

LLAMA3 = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}
SCALINGS = {
    "linear": {"type": "linear", "factor": 4},
    "theta": {"rope_type": "default", "rope_theta": 500000, "max_position_embeddings": 1024},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3-of-base": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 64},
    "yarn-all-keys": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128,
        "rope_theta": 77000, "beta_fast": 16, "beta_slow": 2, "truncate": False,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 40, "factor": 3,
        "short_factor": [1 + 0.05 * i for i in range(8)],
        "long_factor": [1.2 + 0.9 * i for i in range(8)],
    },
}  # fmt: skip
ADAPTERS = ["rank-4-attention", "rank-8-all-linear", "dora"]


@dataclass(frozen=True)
class RopeStage:
    """A base, adapters with and without a rope of their own, and a reference for each."""

    base: TinyBase
    driver: Driver
    scalings: Sequence[str]
    slots: dict[str, int]
    """By scaling, and `plain`; the same adapter without its rope lies one slot further."""
    references: dict[str, Reference]


def set_rope_stage(base: TinyBase, scalings: Sequence[str], root: Path) -> RopeStage:
    """One adapter for each of `SCALINGS` named, and a plain one."""
    driver = Driver(parity_runner(base.folder, arena_bytes=64 << 20))
    slots: dict[str, int] = {}
    references: dict[str, Reference] = {}
    is_odd = base.model.config.model_type in ("phi3", *EXPERT_FAMILIES)  # their linears are fused
    features = ADAPTERS[:1] if is_odd else ADAPTERS
    for place, name in enumerate([*scalings, "plain"]):
        feature = features[place % len(features)]
        folder = make_adapter(base, feature, root / name, seed=place)
        own_base = base
        if name != "plain":
            driver.load(2 * place + 2, folder)
            path = folder / "adapter_config.json"
            fields = json.loads(path.read_text()) | {"rope_scaling": scaling_of(base, name)}
            path.write_text(json.dumps(fields))
            own_base = rescaled(base, scaling_of(base, name))
        references[name] = Reference(own_base, {feature: folder})
        slots[name] = 2 * place + 1
        driver.load(slots[name], folder)
    return RopeStage(base, driver, scalings, slots, references)


def scaling_of(base: TinyBase, name: str) -> dict[str, object]:
    """A scaling, its lists as long as the base's pairs."""
    scaling = dict(SCALINGS[name])
    config = base.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    for key in ("short_factor", "long_factor"):
        if key in scaling:
            first, second = scaling[key][:2]
            count = int(head_dim * part) // 2
            scaling[key] = [first + i * (second - first) for i in range(count)]
    return scaling


def rescaled(base: TinyBase, scaling: dict[str, object]) -> TinyBase:
    """The base as transformers runs it with another config."""
    config = copy.deepcopy(base.model.config)
    context = read(scaling).context_tokens(config.max_position_embeddings)
    own = {key: value for key, value in scaling.items() if key not in ("type",)}
    own = {"rope_type": scaling.get("type"), **own}
    own.pop("max_position_embeddings", None)
    parameters = config.rope_parameters
    nested = "full_attention" in parameters
    old = parameters["full_attention"] if nested else parameters
    kept = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
    own.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if own["rope_type"] in ("linear", "default"):
        del own["original_max_position_embeddings"]
    if "original_max_position_embeddings" in own:  # the config's goes before that of the rope
        config.original_max_position_embeddings = own["original_max_position_embeddings"]
    own = {**kept, **own}
    config.rope_parameters = {**parameters, "full_attention": own} if nested else own
    config.max_position_embeddings = context
    if getattr(config, "head_dim", 0) is None:  # Mixtral's null, which yarn cannot read
        config.head_dim = config.hidden_size // config.num_attention_heads
    model = type(base.model)(config).eval()
    model.load_state_dict(base.model.state_dict())
    model.tie_weights()
    return replace(base, model=model.requires_grad_(False))


def make_jobs(
    stage: RopeStage, num_new_tokens: int, *, stagger: bool, lengths: tuple[int, int] = (30, 70)
) -> list[tuple[str, Job]]:
    """Each scaling twice, the plain adapter once, the base twice."""
    rng = random.Random(5)
    jobs = []
    names = [*stage.slots, *stage.scalings, "base", "base"]
    for place, name in enumerate(names):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(*lengths))]
        if name == "longrope":
            prompt = prompt[: 30 if place % 2 else 60]  # grows long, or is from the beginning
        request = greedy(f"{place}-{name}", prompt, num_new_tokens, logprobs=0)
        if name in stage.scalings:
            layers = own_ropes(stage.driver.runner.layout.ropes, read(scaling_of(stage.base, name)))
            request.rope = OwnRope(name, switch_len_of(layers))
        slots = () if name == "base" else ((stage.slots[name], 1.0),)
        arrival_step = rng.randrange(9)
        jobs.append((name, Job(request, slots, arrival_step if stagger else 0)))
    return jobs


@torch.inference_mode()
def judge(
    stage: RopeStage, jobs: Sequence[tuple[str, Job]]
) -> Iterator[tuple[str, Verdict, float]]:
    """For each finished job: scaling, its verdict, its largest logprob error.

    Raises:
        AssertionError: a token differs by more than a near tie.
    """
    for name, job in jobs:
        prompt, ours = job.request.prompt_ids, job.request.output_ids
        reference = stage.references["plain" if name == "base" else name]
        (adapter,) = [key for key in reference.names if (key is None) == (name == "base")]
        tokens = prompt + ours
        logits = reference.logits(adapter, tokens, len(prompt))
        again = partial(reference.logits64, adapter, tokens, len(prompt))
        verdict = Verdict()
        verdict.judge(len(prompt), ours, logits, again, job.request.request_id)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found = [s.logprobs for s in job.samples if s.logprobs is not None]
        pairs = zip(found, expected, strict=True)
        yield name, verdict, max(abs(e.logprob - row[e.token_id].item()) for e, row in pairs)
