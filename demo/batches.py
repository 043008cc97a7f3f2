"""Training examples as tensors: `prefix text = answer EOS`, loss on the answer only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from demo.skills import SKILLS, prompt_for, training_texts
from demo.tokenizer import EOS_ID, PAD_ID

IGNORED = -100
"""Label of a position without loss, as PyTorch's cross entropy expects."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer. `prefix_id` is BOS, or a task token during pre-training."""

    prefix_id: int
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples padded on the right: under causal attention nothing real sees the padding.

    `input_ids` and `labels` are int64 [num_examples, num_tokens]; a label belongs to the token at
    its own position (the model shifts them), and is IGNORED outside answers.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


def collate(examples: Sequence[Example]) -> Batch:
    """Encode examples, one token a byte, padded to the longest."""
    prompts = [[e.prefix_id, *prompt_for(e.text).encode()] for e in examples]
    answers = [[*e.answer.encode(), EOS_ID] for e in examples]
    num_tokens = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(examples), num_tokens), PAD_ID)
    labels = torch.full((len(examples), num_tokens), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return Batch(input_ids, labels)


def skill_examples(skill_name: str, prefix_id: int, seed: int) -> Iterator[Example]:
    """Yield examples of one skill without end, all after the same prefix token."""
    answer = SKILLS[skill_name].answer
    for text in training_texts(seed):
        yield Example(prefix_id, text, answer(text))


def exact_matches(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which answers greedy decoding would get completely right, as bool [num_examples].

    Judged teacher-forced: every token of an answer is the argmax after the right tokens before
    it exactly when greedy decoding writes that answer.

    Args:
        logits: float [num_examples, num_tokens, vocab].
        labels: int64 [num_examples, num_tokens].
    """
    predicted, wanted = logits[:, :-1].argmax(-1), labels[:, 1:]
    return ((predicted == wanted) | (wanted == IGNORED)).all(-1)
