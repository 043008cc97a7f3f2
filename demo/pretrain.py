"""Pre-trains the demo base: every skill after its own task token, and copying without one.

A task token stands where BOS stands otherwise, so a skill's circuits exist in the base but
nothing in a prompt can reach them: the task tokens are cut off before the base is saved. What is
left copies its text. An adapter learns to wake one skill.
"""

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo.batches import Example, collate, exact_matches
from demo.learning import learning_rate_share, optimizer_step
from demo.skills import SKILLS, training_texts
from demo.tokenizer import BOS_ID, CONTEXT_TOKENS, EOS_ID, PAD_ID, VOCAB_SIZE, save_tokenizer

NUM_STEPS = 3600
BATCH_EXAMPLES = 64
PEAK_LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 100
REPORT_STEPS = 100

_TASK_SHARES = {"reverse": 1.5, "sort": 2.5, "digit-sum": 2.0, "twice": 1.5, "copy": 1.5}
"""How often a task is drawn, where not 1.0: harder ones more often."""


def base_config(num_task_tokens: int) -> LlamaConfig:
    """A Llama of 1.6 million parameters with grouped-query attention and tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE + num_task_tokens,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def task_examples(seed: int) -> Iterator[Example]:
    """Yield examples of all tasks without end; only copying follows BOS."""
    rng = random.Random(f"tasks {seed}")
    tasks = ["copy", *SKILLS]
    shares = [_TASK_SHARES.get(task, 1.0) for task in tasks]
    prefix_ids = {task: VOCAB_SIZE + index for index, task in enumerate(SKILLS)}
    for text in training_texts(seed):
        (task,) = rng.choices(tasks, shares)
        answer = text if task == "copy" else SKILLS[task].answer(text)
        yield Example(prefix_ids.get(task, BOS_ID), text, answer)


def pretrain(seed: int, report: Callable[[str], None]) -> LlamaForCausalLM:
    """Train a base from scratch; returns it in float32, still with the task tokens."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(base_config(len(SKILLS)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    examples, start_s = task_examples(seed), time.monotonic()
    for step in range(NUM_STEPS):
        share = learning_rate_share(step, NUM_STEPS, NUM_WARMUP_STEPS)
        optimizer.param_groups[0]["lr"] = PEAK_LEARNING_RATE * share
        loss = optimizer_step(model, optimizer, list(islice(examples, BATCH_EXAMPLES)))
        if (step + 1) % REPORT_STEPS == 0:
            elapsed_s = time.monotonic() - start_s
            report(
                f"base: step {step + 1}/{NUM_STEPS}, loss {loss:.4f}, "
                f"{elapsed_s:.0f} s; {task_scores(model)}"
            )
    return model


@torch.no_grad()
def task_scores(model: LlamaForCausalLM) -> str:
    """Percent of exact answers by task, on examples that are the same at every call."""
    examples = list(islice(task_examples(seed=1_000_003), 512))
    batch = collate(examples)
    right = exact_matches(model(input_ids=batch.input_ids).logits, batch.labels)
    names = {VOCAB_SIZE + index: name for index, name in enumerate(SKILLS)} | {BOS_ID: "copy"}
    scores: dict[str, list[bool]] = {}
    for example, is_right in zip(examples, right.tolist(), strict=True):
        scores.setdefault(names[example.prefix_id], []).append(is_right)
    return ", ".join(f"{k} {100 * sum(v) / len(v):.0f}%" for k, v in sorted(scores.items()))


def save_base(model: LlamaForCausalLM, folder: Path) -> None:
    """Cut the task tokens off and write the base in Hugging Face layout, weights in float16.

    Mutates: the model (vocabulary and dtype).
    """
    model.resize_token_embeddings(VOCAB_SIZE, mean_resizing=False)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.half().save_pretrained(folder)
    save_tokenizer(folder)
