"""Held-out accuracy of the saved files, by transformers and PEFT in float32, and its table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.recipes import RECIPES
from demo.skills import SKILLS, held_out

MAX_ANSWER_TOKENS = 32
TABLE_BEGIN = "<!-- table: written by demo/train.py -->"
TABLE_END = "<!-- end of table -->"


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of held-out prompts that the adapter and the base without an adapter answer
    exactly."""

    skill_name: str
    adapter_share: float
    base_share: float
    adapter_bytes: int


@torch.no_grad()
def greedy_answers(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> list[str | None]:
    """Answer prompts greedily; None if no EOS came within MAX_ANSWER_TOKENS.

    Prompts of equal length run together, so that nothing is padded.
    """
    prompt_ids = [tokenizer(prompt).input_ids for prompt in prompts]
    answers: list[str | None] = [None] * len(prompts)
    for num_tokens in sorted({len(ids) for ids in prompt_ids}):
        rows = [row for row, ids in enumerate(prompt_ids) if len(ids) == num_tokens]
        input_ids = torch.tensor([prompt_ids[row] for row in rows])
        output_ids = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=False,
        )
        for row, ids in zip(rows, output_ids[:, num_tokens:].tolist(), strict=True):
            if tokenizer.eos_token_id in ids:
                answers[row] = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)])
    return answers


def share_exact(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[tuple[str, str]],
) -> float:
    """Share of (prompt, right answer) pairs that greedy decoding answers exactly."""
    answers = greedy_answers(model, tokenizer, [prompt for prompt, _ in questions])
    right = [answer == wanted for answer, (_, wanted) in zip(answers, questions, strict=True)]
    return sum(right) / len(right)


def score_all(base: Path, adapters: Path, num_prompts: int, seed: int) -> list[Score]:
    """Score every saved adapter, and the base without one, on the same held-out prompts of each
    skill."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    bare = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompts = [prompt for prompt, _ in held_out(next(iter(SKILLS)), num_prompts, seed)]
    copied = greedy_answers(bare, tokenizer, prompts)
    scores = []
    for name in (name for name in SKILLS if (adapters / name).is_dir()):
        questions = held_out(name, num_prompts, seed)
        base_share = sum(c == a for c, (_, a) in zip(copied, questions, strict=True)) / num_prompts
        fresh = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(fresh, adapters / name).eval()
        adapter_share = share_exact(adapted, tokenizer, questions)
        scores.append(Score(name, adapter_share, base_share, folder_bytes(adapters / name)))
    return scores


def folder_bytes(folder: Path) -> int:
    """Bytes of weights under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def table(scores: Sequence[Score], num_prompts: int) -> str:
    """The accuracy table in Markdown, with one held-out example a row."""
    lines = [
        f"| adapter | what it does | rank | targets | kind | right of {num_prompts} "
        "| bare base | KiB | held-out example |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for score in scores:
        skill, recipe = SKILLS[score.skill_name], RECIPES[score.skill_name]
        prompt, answer = max(held_out(score.skill_name, 10, seed=0), key=lambda q: len(q[0]))
        lines.append(
            f"| `{skill.name}` | {skill.description} | {recipe.rank} | {recipe.targets()} "
            f"| {recipe.kind()} | {score.adapter_share:.1%} | {score.base_share:.1%} "
            f"| {score.adapter_bytes / 1024:.0f} | `{prompt}` `{answer}` |"
        )
    return "\n".join(lines)


def write_table(readme: Path, text: str) -> None:
    """Replace the text between the two marks of a README.

    Raises:
        ValueError: the marks are missing.
    """
    page = readme.read_text(encoding="utf-8")
    before, begin, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ValueError(f"{readme.name}: needs the lines {TABLE_BEGIN!r} and {TABLE_END!r}")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
