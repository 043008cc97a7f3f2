"""An adapter that improves while it serves: reinforcement learning against a running stack.

    python -m demo.reinforce [--skill upper] [--updates 30] [--results FILE.json]

A trainer (plain PEFT on the demo base) samples groups of answers from the gateway, rewards them,
takes one step of GRPO (arXiv 2402.03300) with the logprobs that came with the tokens, and publishes
the adapter from memory. Nothing is restarted or paused: requests that name the adapter get better
answers from one update to the next.

The adapter begins undecided: a few supervised steps on several skills at once leave it with a bit
of each. The reward says which one is wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaForCausalLM

from demo.batches import skill_examples
from demo.learning import optimizer_step
from demo.recipes import BASE_ID, RECIPES
from demo.skills import SKILLS, held_out, prompt_for, training_texts
from demo.stack import running_stack
from demo.tokenizer import BOS_ID, PAD_ID
from loraplex import InferenceClient, Publication, RegistryClient, Sampling
from loraplex.client.generation import Choice

BASE = Path(__file__).parent / "base"
NAME = "learner"
NUM_PROMPTS, GROUP = 16, 8
MAX_ANSWER_TOKENS = 24
WARM_STEPS = 30
OTHER_SKILLS = ("mask", "twice", "rot13")
"""The other skills that the adapter has at first."""
WARM_RATE, LEARNING_RATE = 2e-3, 4e-4
CLIP = 0.2
"""Clipping range of the ratio of a token's probability to that with which it was sampled."""
NUM_ASKED = 64
"""Number of unseen questions for one measurement of the accuracy."""
LOOK_UPDATES = 3
"""Number of updates between two measurements."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One sampled answer with its reward relative to its group."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class Look:
    """One measurement of the served adapter."""

    update: int
    elapsed_s: float
    reward: float
    share_right: float
    version: str


class Learner:
    """The adapter in training."""

    def __init__(self, skill_name: str, seed: int) -> None:
        torch.manual_seed(seed)
        base = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        self.model: PeftModel = get_peft_model(base, RECIPES[skill_name].lora_config())
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=LEARNING_RATE, weight_decay=0.0)
        warm = torch.optim.AdamW(self._trained, lr=WARM_RATE, weight_decay=0.0)
        skills = [skill_examples(name, BOS_ID, seed) for name in (skill_name, *OTHER_SKILLS)]
        for _ in range(WARM_STEPS):
            mixed = [next(examples) for examples in skills for _ in range(8)]
            optimizer_step(self.model, warm, mixed)

    def learn(self, answers: Sequence[Answered]) -> None:
        """One step of the clipped policy gradient over all answer tokens."""
        rows = [(*a.prompt_ids, *a.token_ids) for a in answers]
        num_tokens = max(map(len, rows))
        ids = torch.full((len(rows), num_tokens), PAD_ID)
        old, weights = torch.zeros(ids.shape), torch.zeros(ids.shape)
        for row, (answer, tokens) in enumerate(zip(answers, rows, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            own = slice(len(answer.prompt_ids), len(tokens))
            old[row, own] = torch.tensor(answer.logprobs)
            weights[row, own] = answer.advantage
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (chosen - old[:, 1:]).exp()
        gain = torch.minimum(
            ratio * weights[:, 1:], ratio.clamp(1 - CLIP, 1 + CLIP) * weights[:, 1:]
        )
        (-gain.sum() / sum(len(a.token_ids) for a in answers)).backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def reward_of(answer: str, wanted: str) -> float:
    """1 for the right answer; otherwise less than 0.5, depending on how much of it is right."""
    if answer == wanted:
        return 1.0
    return 0.5 * SequenceMatcher(None, answer, wanted, autojunk=False).ratio()


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group in standard deviations from their mean; 0 if all are equal."""
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread + 1e-4) for reward in rewards]


async def sampled(
    gateway: InferenceClient, digest: str, skill_name: str, texts: Sequence[str], seed: int
) -> tuple[list[Answered], float]:
    """Sample a group of answers to each text from the version of a digest; returns them and their
    mean reward."""
    model = f"{NAME}@{digest}"
    wish = Sampling(max_tokens=MAX_ANSWER_TOKENS, temperature=1.0, logprobs=0, n=GROUP, seed=seed)
    done = await asyncio.gather(
        *(gateway.complete(model, (BOS_ID, *prompt_for(t).encode()), wish) for t in texts)
    )
    answered, rewards = [], []
    for text, completion in zip(texts, done, strict=True):
        wanted = SKILLS[skill_name].answer(text)
        spans = [span for choice in completion.choices for span in choice.spans]
        assert {span.digests for span in spans} == {(digest,)}, "tokens of other weights"
        group = [reward_of(choice.text, wanted) for choice in completion.choices]
        rewards += group
        prompt_ids = (BOS_ID, *prompt_for(text).encode())
        answered += [
            _answered(prompt_ids, choice, advantage)
            for choice, advantage in zip(completion.choices, advantages(group), strict=True)
            if advantage
        ]
    return answered, statistics.fmean(rewards)


def _answered(prompt_ids: tuple[int, ...], choice: Choice, advantage: float) -> Answered:
    logprobs = tuple(entry.logprob for entry in choice.logprobs)
    return Answered(prompt_ids, choice.token_ids, logprobs, advantage)


async def share_right(gateway: InferenceClient, skill_name: str) -> float:
    """Share of unseen questions that the adapter answers correctly now, requested by its name."""
    questions = held_out(skill_name, NUM_ASKED, seed=0)
    greedy = Sampling(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    done = await asyncio.gather(
        *(gateway.complete(NAME, prompt, greedy) for prompt, _ in questions)
    )
    right = [each.text == wanted for each, (_, wanted) in zip(done, questions, strict=True)]
    return sum(right) / len(right)


async def improve(
    grpc: str, registry_address: str, skill_name: str, num_updates: int, seed: int
) -> list[Look]:
    """Train for a number of updates; returns the measurements."""
    learner = await asyncio.to_thread(Learner, skill_name, seed)
    texts = training_texts(seed + 1)
    draw = random.Random(seed)
    begin_s, looks = time.monotonic(), []
    async with RegistryClient(registry_address) as registry, InferenceClient(grpc) as gateway:
        for update in range(num_updates + 1):
            published = await registry.publish(
                get_peft_model_state_dict(learner.model),
                learner.model.peft_config["default"],
                Publication(NAME, keep_versions=4),
            )
            version = published.version
            answered, reward = await sampled(
                gateway,
                version.digest,
                skill_name,
                list(islice(texts, NUM_PROMPTS)),
                draw.getrandbits(63),
            )
            if update % LOOK_UPDATES == 0 or update == num_updates:
                share = await share_right(gateway, skill_name)
                elapsed_s = time.monotonic() - begin_s
                looks.append(Look(update, elapsed_s, reward, share, f"v{version.version}"))
                print(_line(looks[-1]), flush=True)
            if answered and update < num_updates:
                await asyncio.to_thread(learner.learn, answered)
    return looks


def _line(look: Look) -> str:
    bar = "#" * round(40 * look.share_right)
    return (
        f"update {look.update:4d}  {look.elapsed_s:5.0f} s  {look.version:>5}  "
        f"reward {look.reward:.2f}  right {look.share_right:6.1%}  {bar}"
    )


def main() -> int:
    """Run the loop; exit 0 if the adapter answers more at the end than at the beginning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--skill", choices=sorted(SKILLS), default="upper")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="write the measurements as JSON")
    args = parser.parse_args()
    settings = {"LORAPLEX_DTYPE": "float32", "LORAPLEX_KV_MEMORY": "128MiB"}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(BASE, BASE_ID, Path(folder), settings) as stack,
    ):
        looks = asyncio.run(
            improve(stack.grpc, stack.registry, args.skill, args.updates, args.seed)
        )
    if args.results is not None:
        args.results.write_text(json.dumps([asdict(look) for look in looks], indent=1) + "\n")
    return 0 if looks[-1].share_right > looks[0].share_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
