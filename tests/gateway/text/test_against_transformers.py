"""Truncation and continued messages, as transformers does them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from loraplex.api.request import ChatPrompt, TextPrompt, TokenPrompt
from loraplex.errors import InvalidRequest
from loraplex_services.gateway.request import ServedModel, Truncation
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.text.tokenizer import BaseTokenizer
from tests.gateway.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, byte_tokenizer, tokenizer_files

transformers = pytest.importorskip("transformers")

BASE = ServedModel("base", VOCAB_SIZE, 512)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = (
    "{% for m in messages %}[{{ m.role | upper }}] {{ m.content | trim }} [/]\n{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    made = TemplatePool()
    yield made
    await made.close()


def _files(tmp_path: Path, template: str) -> tuple[dict[str, bytes], Any]:
    """Files whose special tokens stand on both sides, and transformers' tokenizer of them."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)],
    )
    files = tokenizer_files(template) | {"tokenizer.json": tokenizer.to_str().encode()}
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=template
    )
    return files, theirs


@pytest.mark.parametrize("keeps_end", [True, False])
@pytest.mark.parametrize("text", ["", "a", "héllo wörld, this is long"])
@pytest.mark.parametrize("add_special", [True, False])
@pytest.mark.parametrize("max_tokens", [2, 3, 9, 500])
async def test_texts_are_truncated_as_transformers_does(
    pool: TemplatePool,
    tmp_path: Path,
    keeps_end: bool,
    text: str,
    add_special: bool,
    max_tokens: int,
) -> None:
    files, theirs = _files(tmp_path, CHATML)
    theirs.truncation_side = "left" if keeps_end else "right"
    expected = theirs(
        text or "x", truncation=True, max_length=max_tokens, add_special_tokens=add_special
    )["input_ids"]
    ours = await BaseTokenizer(files, pool).encode(
        TextPrompt(text or "x", add_special), BASE, truncation=Truncation(max_tokens, keeps_end)
    )
    assert list(ours) == expected


@pytest.mark.parametrize("pair", [("a", "long enough to cut"), ("long enough to cut", "a")])
@pytest.mark.parametrize("max_tokens", [3, 4, 9, 10, 500])
@pytest.mark.parametrize("keeps_end", [True, False])
async def test_pairs_are_truncated_as_transformers_does(
    pool: TemplatePool, tmp_path: Path, keeps_end: bool, pair: tuple[str, str], max_tokens: int
) -> None:
    files, theirs = _files(tmp_path, CHATML)
    theirs.truncation_side = "left" if keeps_end else "right"
    pairs = [pair, (pair[0] * 2, pair[1] * 2), ("as long as", "the other!")]
    for first, second in pairs:
        expected = theirs(first, second, truncation=True, max_length=max_tokens)["input_ids"]
        ours = await BaseTokenizer(files, pool).encode(
            TextPrompt(first, pair=second), BASE, truncation=Truncation(max_tokens, keeps_end)
        )
        assert list(ours) == expected


async def test_token_ids_are_cut_at_the_same_side(pool: TemplatePool, tmp_path: Path) -> None:
    tokenizer = BaseTokenizer(_files(tmp_path, CHATML)[0], pool)
    prompt = TokenPrompt((1, 2, 3, 4))
    assert await tokenizer.encode(prompt, BASE, truncation=Truncation(2, keeps_end=True)) == (3, 4)
    assert await tokenizer.encode(prompt, BASE, truncation=Truncation(2, keeps_end=False)) == (1, 2)
    assert await tokenizer.encode(prompt, BASE, truncation=Truncation(9, keeps_end=True)) == (
        1,
        2,
        3,
        4,
    )


@pytest.mark.parametrize("template", [CHATML, STRIPPING])
@pytest.mark.parametrize("last", ["The answer is", "The answer is ", " is", "<think>\nhm", "[/]"])
async def test_a_final_message_is_continued_as_transformers_does(
    pool: TemplatePool, tmp_path: Path, template: str, last: str
) -> None:
    files, theirs = _files(tmp_path, template)
    messages = [{"role": "user", "content": last}, {"role": "assistant", "content": last}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    prompt = ChatPrompt(tuple(messages), add_generation_prompt=False, continue_final_message=True)
    ids = await BaseTokenizer(files, pool).encode(prompt, BASE)
    assert bytes(ids).decode() == expected


@pytest.mark.parametrize(
    ("template", "content", "field"),
    [
        (CHATML, None, "messages[0].content"),
        ("{{ messages[0].role }}", "x", "continue_final_message"),
    ],
)
async def test_what_cannot_be_continued_is_named(
    pool: TemplatePool, tmp_path: Path, template: str, content: str | None, field: str
) -> None:
    tokenizer = BaseTokenizer(_files(tmp_path, template)[0], pool)
    message = {"role": "assistant", "content": content}
    prompt = ChatPrompt((message,), add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest) as caught:
        await tokenizer.encode(prompt, BASE)
    assert caught.value.violations[0].field == field
