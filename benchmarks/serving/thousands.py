"""2,000 adapters of S-LoRA's workload that change while they serve: wrong tokens, failures, memory.

    python -m benchmarks run serving.thousands [--minutes 30] [--adapters 2000] [--rate 4]

The stack is `loraplex up` with the demo base in float32 and an arena that holds a part of the
adapters. Requests are those of the paper (a Gamma process for each adapter, rates by a power law),
with lengths that the base's context allows. Meanwhile, one change is made each second: a new name,
a new version, a tag moved back to the version before, a name deleted.

Every answer names the digest that computed it. Sampled answers are compared with PEFT's greedy
choice at each position; where PEFT's two best tokens are closer than rounding, either is right. As
a control, some are also compared with the weights of another version. An answer is stale if its
version was replaced more than five seconds before the request. The exit code is 1 if a token is
wrong, an answer is stale, a request or a change failed, controls are not told apart, or the memory
of all processes grew by more than 5% from one third of the run to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.machine import options_of, write_results
from demo.stack import Stack, running_stack
from loraplex import InferenceClient, Publication, RegistryClient, Sampling
from loraplex.workload import TracedRequest, UniformLengths, Workload, generate
from loraplex.workload.driving import random_prompt

BASE = Path(__file__).parents[2] / "demo" / "base"
RANKS = (16, 8, 4, 2)
STALE_S = 5.0
CHANGE_S = 1.0
MEMORY_S = 5.0
NUM_UPLOADS = 8
"""At once, before the requests."""
NUM_CONTROLS = 20
NUM_CHANGING = 20
"""Names that get new versions."""
MAX_GROWTH = 0.05
ROUNDING = 1e-3
"""Largest difference of two float32 logits that is due to the order of sums."""
SETTINGS = {
    "LORAPLEX_DTYPE": "float32",
    "LORAPLEX_KV_MEMORY": "96MiB",
    "LORAPLEX_CACHE_BYTES": "256MiB",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    name: str
    digest: str
    prompt: list[int]
    tokens: list[int]
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """`latest` of a name was pointed at a version, some time between two moments."""

    begin_s: float
    end_s: float
    digest: str
    number: int
    """Of the version."""


@dataclass(slots=True)
class Fleet:
    """All names and versions, and what happened."""

    seeds: dict[str, int] = field(default_factory=dict)
    """The seed of the weights of each digest."""
    moves: dict[str, list[Move]] = field(default_factory=dict)
    """By name."""
    counts: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    memory: list[Counter[str]] = field(default_factory=list)
    """Bytes by process, every five seconds."""

    def is_stale(self, answer: Answer) -> bool:
        """Whether its version was not, or no longer, that of its name."""
        moves = self.moves[answer.name]
        return not any(
            move.digest == answer.digest
            and move.begin_s <= answer.end_s
            and (later is None or later.end_s >= answer.begin_s - STALE_S)
            for move, later in zip(moves, [*moves[1:], None], strict=True)
        )


def adapter_of(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights that follow from `seed`, and their config: on q and v, or on every attention linear
    and the down projection."""
    config = json.loads((BASE / "config.json").read_bytes())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.v_proj": (hidden, kv)}
    if seed % 2:
        sizes |= {"self_attn.k_proj": (hidden, kv), "self_attn.o_proj": (hidden, hidden)}
        sizes |= {"mlp.down_proj": (width, hidden)}
    rng, rank = np.random.default_rng(seed), RANKS[seed % len(RANKS)]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (num_in, num_out) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            a, b = rng.standard_normal((rank, num_in)), rng.standard_normal((num_out, rank))
            tensors[f"{stem}.lora_A.weight"] = torch.tensor(a / num_in**0.5, dtype=torch.float32)
            tensors[f"{stem}.lora_B.weight"] = torch.tensor(0.1 * b, dtype=torch.float32)
    names = [module.split(".")[1] for module in sizes]
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": names,
        "base_model_name_or_path": "demo",
    }


async def publish(fleet: Fleet, registry: RegistryClient, name: str) -> None:
    """A new version, which becomes `latest`."""
    fleet.counts["publish"] += 1
    seed, begin_s = fleet.counts["publish"], time.monotonic()
    tensors, config = await asyncio.to_thread(adapter_of, seed)
    version = (await registry.publish(tensors, config, Publication(name))).version
    fleet.seeds[version.digest] = seed
    moves = fleet.moves.setdefault(name, [])
    moves.append(Move(begin_s, time.monotonic(), version.digest, version.version))


async def move_back(fleet: Fleet, registry: RegistryClient, name: str) -> None:
    """`latest` points at the version before, if there is one."""
    moves = fleet.moves[name]
    earlier = [move for move in moves if move.number < moves[-1].number]
    if earlier:
        begin_s, target = time.monotonic(), earlier[-1]
        await registry.set_tag(name, "latest", {target.number: 1})
        moves.append(Move(begin_s, time.monotonic(), target.digest, target.number))
        fleet.counts["move back"] += 1


async def change(fleet: Fleet, registry: RegistryClient, names: Sequence[str]) -> None:
    """One change a second, until it is cancelled."""
    rng = random.Random(0)
    for number in itertools.count():
        await asyncio.sleep(CHANGE_S)
        name, extra = rng.choice(names[:NUM_CHANGING]), f"extra-{number // 4}"
        match number % 4:
            case 0:
                await counted(fleet, publish(fleet, registry, extra))
            case 1:
                await counted(fleet, publish(fleet, registry, name))
            case 2:
                await counted(fleet, move_back(fleet, registry, name))
            case 3:
                await counted(fleet, delete(fleet, registry, extra))


async def delete(fleet: Fleet, registry: RegistryClient, name: str) -> None:
    """A name with all its versions, which no request asks for."""
    await registry.delete(name, every=True)
    fleet.counts["delete"] += 1


async def ask(fleet: Fleet, gateway: InferenceClient, name: str, traced: TracedRequest) -> None:
    """One request of the trace, greedy."""
    prompt = random_prompt(f"{name}/{traced.arrival_s}", traced.num_input)
    sampling = Sampling(max_tokens=traced.num_output, temperature=0.0, ignore_eos=True)
    begin_s = time.monotonic()
    chunks = [chunk async for chunk in gateway.generate(name, prompt, sampling)]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    [digest] = {chunk.digests[0] for chunk in chunks if chunk.token_ids}
    assert len(tokens) == traced.num_output, "tokens are missing"
    fleet.counts["tokens"] += len(tokens)
    fleet.answers.append(Answer(name, digest, prompt, tokens, begin_s, time.monotonic()))


async def counted(fleet: Fleet, work: Awaitable[None]) -> None:
    """A failure is printed and counted."""
    try:
        await work
    except Exception as error:
        fleet.counts["failed"] += 1
        print(f"failed: {error!r}", flush=True)


async def watch_memory(fleet: Fleet) -> None:
    """Resident bytes of the stack's processes, until it is cancelled."""
    while True:
        found: Counter[str] = Counter()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found[" ".join(process.cmdline()[1:3])] += process.memory_info().rss
        fleet.memory.append(found)
        await asyncio.sleep(MEMORY_S)


async def serve(stack: Stack, workload: Workload) -> Fleet:
    """Publish, then send the trace while adapters change."""
    fleet = Fleet()
    names = [f"adapter-{index:04d}" for index in range(workload.num_adapters)]
    async with RegistryClient(stack.registry) as registry, InferenceClient(stack.grpc) as gateway:
        for first in range(0, len(names), NUM_UPLOADS):
            some = names[first : first + NUM_UPLOADS]
            await asyncio.gather(*(publish(fleet, registry, name) for name in some))
        print(f"{len(names)} adapters are published", flush=True)
        tasks = [
            asyncio.create_task(change(fleet, registry, names)),
            asyncio.create_task(watch_memory(fleet)),
        ]
        begin_s = time.monotonic()

        async def send(traced: TracedRequest) -> None:
            assert traced.adapter is not None, "every request has one"
            await asyncio.sleep(begin_s + traced.arrival_s - time.monotonic())
            await counted(fleet, ask(fleet, gateway, names[traced.adapter], traced))

        await asyncio.gather(*map(send, generate(workload)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return fleet


class Peft:
    """The base, and an adapter of each rank and set of modules that takes on weights."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        self._shapes: set[str] = set()

    def wrong_tokens(self, answer: Answer, seed: int) -> int:
        """Tokens of an answer that the weights of `seed` would not have chosen."""
        from peft import set_peft_model_state_dict

        tensors, config = adapter_of(seed)
        name = f"{config['r']}-{len(config['target_modules'])}"
        if name not in self._shapes:
            self._add(name, config)
        self._model.set_adapter(name)
        set_peft_model_state_dict(self._model, tensors, adapter_name=name)
        with torch.inference_mode():
            rows = torch.tensor([answer.prompt + answer.tokens[:-1]])
            logits = self._model.eval()(rows).logits[0, -len(answer.tokens) :]
        given = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        return int((given < logits.max(dim=1).values - ROUNDING).sum())

    def _add(self, name: str, config: dict[str, Any]) -> None:
        from peft import LoraConfig, get_peft_model

        fields = ("r", "lora_alpha", "target_modules", "task_type")
        own = LoraConfig(**{key: config[key] for key in fields})
        if self._shapes:
            self._model.add_adapter(name, own)
        else:
            self._model = get_peft_model(self._model, own, adapter_name=name)
        self._shapes.add(name)


def compare(fleet: Fleet, num_samples: int) -> dict[str, int]:
    """Sampled answers with PEFT's choices."""
    peft, rng = Peft(), random.Random(0)
    chosen = rng.sample(fleet.answers, min(num_samples, len(fleet.answers)))
    controls = chosen[:NUM_CONTROLS]
    others = [rng.choice([d for d in fleet.seeds if d != a.digest]) for a in controls]
    return {
        "tokens compared with PEFT": sum(len(answer.tokens) for answer in chosen),
        "wrong tokens": sum(peft.wrong_tokens(a, fleet.seeds[a.digest]) for a in chosen),
        "controls": len(controls),
        "controls told apart": sum(
            peft.wrong_tokens(answer, fleet.seeds[other]) > 0
            for answer, other in zip(controls, others, strict=True)
        ),
    }


def main() -> int:
    """Print and write the results. Returns the exit code."""
    parser = options_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (4)")
    parser.add_argument("--alpha", type=float, default=1.0, help="of the power law; 1 = uniform")
    parser.add_argument("--samples", type=int, default=500, help="answers compared with PEFT")
    args = parser.parse_args()
    lengths = UniformLengths((8, 128), (8, 128))
    workload = Workload(
        args.adapters, args.rate, 60 * args.minutes, alpha=args.alpha, lengths=lengths
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(BASE, "demo", Path(folder), SETTINGS) as stack,
    ):
        fleet = asyncio.run(serve(stack, workload))
    third, last = fleet.memory[len(fleet.memory) // 3], fleet.memory[-1]
    growth = last.total() / third.total() - 1
    results = {
        **{key: fleet.counts[key] for key in ("publish", "move back", "delete", "tokens")},
        "answers": len(fleet.answers),
        "versions that answered": len({answer.digest for answer in fleet.answers}),
        "failed": fleet.counts["failed"],
        "stale": sum(map(fleet.is_stale, fleet.answers)),
        **(compared := compare(fleet, args.samples)),
        "memory growth": round(growth, 4),
        "MB grown, by process": {key: round((last[key] - third[key]) / 1e6, 1) for key in last},
        "MB at the end": round(last.total() / 1e6),
        "MB every two minutes, by process": {
            key: [round(found[key] / 1e6, 1) for found in fleet.memory[:: round(120 / MEMORY_S)]]
            for key in last
        },
    }
    print(json.dumps(results, indent=1))
    write_results("thousands", results, args)
    broken = results["failed"] or results["stale"] or compared["wrong tokens"]
    blind = compared["controls told apart"] < 0.9 * NUM_CONTROLS
    return int(bool(broken) or blind or growth > MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
