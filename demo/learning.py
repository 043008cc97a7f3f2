"""One optimiser step over examples of mixed lengths, with little padding."""

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from demo.batches import IGNORED, Example, collate

CHUNK_EXAMPLES = 32


def learning_rate_share(step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Share of the peak rate: linear warm-up, a plateau, linear decay over the second half."""
    warm = (step + 1) / num_warmup_steps
    return min(1.0, warm, max(0.01, 2 * (num_steps - step) / num_steps))


def optimizer_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, examples: Sequence[Example]
) -> float:
    """Step on the mean loss over all answer tokens; return that loss.

    Examples are sorted by length and run in chunks, each padded separately; their gradients add
    up to those of the whole batch.

    Mutates: parameters, gradients, optimiser state.
    """
    by_length = sorted(examples, key=lambda e: len(e.text) + len(e.answer))
    num_answer_tokens = sum(len(e.answer) + 1 for e in examples)
    total_loss = 0.0
    for start in range(0, len(by_length), CHUNK_EXAMPLES):
        batch = collate(by_length[start : start + CHUNK_EXAMPLES])
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(
            logits.flatten(0, 1),
            batch.labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (loss / num_answer_tokens).backward()
        total_loss += loss.item()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total_loss / num_answer_tokens
