"""From prompts to ids: special tokens, chat templates, legal ids."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.api.request import ChatPrompt, TextPrompt, TokenPrompt
from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import MAX_CHARS_PER_TOKEN, TEMPLATES
from loraplex_services.gateway.request import ServedModel, Truncation
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.text.tokenizer import BaseTokenizer, IdsOnly
from tests.gateway.tiny_tokenizer import BOS_ID, VOCAB_SIZE, tokenizer_files

BASE = ServedModel("base", VOCAB_SIZE, 512)
HI = ChatPrompt(({"role": "user", "content": "hi"},))


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    made = TemplatePool(replace(TEMPLATES, num_processes=1, timeout_s=0.5))
    yield made
    await made.close()


async def _field_of_refusal(tokenizer: BaseTokenizer | IdsOnly, prompt: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await tokenizer.encode(prompt, BASE)  # type: ignore[arg-type]
    return caught.value.violations[0].field


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_special_tokens_go_before_texts_but_not_after_a_template(pool: TemplatePool) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    assert await tokenizer.encode(TextPrompt("hi"), BASE) == (BOS_ID, *b"hi")
    assert await tokenizer.encode(HI, BASE) == tuple(b"[user]hi[assistant]")


async def test_special_tokens_of_the_config_are_known_to_the_template(pool: TemplatePool) -> None:
    files = tokenizer_files("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    ids = await BaseTokenizer(files, pool).encode(HI, BASE)
    assert ids == (BOS_ID, *b"hi", BOS_ID + 1)


async def test_template_file_wins_over_the_config(pool: TemplatePool) -> None:
    files = tokenizer_files() | {"chat_template.jinja": b"file"}
    assert await BaseTokenizer(files, pool).encode(HI, BASE) == tuple(b"file")


async def test_named_templates_mean_their_default(pool: TemplatePool) -> None:
    files = tokenizer_files()
    files["tokenizer_config.json"] = (
        b'{"chat_template": [{"name": "tool_use", "template": "x"},'
        b'{"name": "default", "template": "d"}]}'
    )
    assert await BaseTokenizer(files, pool).encode(HI, BASE) == tuple(b"d")


async def test_chat_without_a_template_names_chat_template(pool: TemplatePool) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(None), pool)
    assert await _field_of_refusal(tokenizer, HI) == "chat_template"


async def test_any_id_of_the_vocabulary_is_a_legal_prompt(pool: TemplatePool) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    assert await tokenizer.encode(TokenPrompt((VOCAB_SIZE - 1,)), BASE) == (VOCAB_SIZE - 1,)
    for ids in ((), (VOCAB_SIZE,), (-1,)):
        assert await _field_of_refusal(tokenizer, TokenPrompt(ids)) == "prompt"


@pytest.mark.parametrize("text", ["", "\ud800"])
async def test_empty_or_broken_text_is_refused(pool: TemplatePool, text: str) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    assert await _field_of_refusal(tokenizer, TextPrompt(text)) == "prompt"


async def test_template_that_never_ends_is_killed_and_the_next_one_served(
    pool: TemplatePool,
) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert await pool.render("warm", {}) == "warm"
    with pytest.raises(InvalidRequest) as caught:
        await pool.render(slow, {})
    assert caught.value.violations[0].field == "chat_template"
    assert await pool.render("{{ x }}", {"x": "next"}) == "next"


@pytest.mark.hostile
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ 'x' * 10**10 }}",
        "{% for",
    ],
)
async def test_template_that_breaks_out_or_breaks_down_is_refused(
    pool: TemplatePool, template: str
) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(template), pool)
    assert await _field_of_refusal(tokenizer, HI) == "chat_template"


async def test_refusal_of_a_template_says_only_what_stands_in_it(pool: TemplatePool) -> None:
    plain = "{{ raise_exception('one user message please') }}"
    with pytest.raises(InvalidRequest, match="one user message please"):
        await pool.render(plain, {})
    leaky = "{{ raise_exception('bad: ' + secret) }}"
    with pytest.raises(InvalidRequest) as caught:
        await pool.render(leaky, {"secret": "hunter2"})
    assert "hunter2" not in str(caught.value)


async def test_what_models_write_in_templates_works(pool: TemplatePool) -> None:
    template = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson(ensure_ascii=False, indent=None) }}"
        "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    out = await pool.render(template, {"messages": [1, {"a": "é<"}]})
    assert out.startswith('{"a": "é<"}20')


async def test_base_without_a_tokenizer_takes_ids_only() -> None:
    assert await IdsOnly().encode(TokenPrompt((5,)), BASE) == (5,)
    assert await _field_of_refusal(IdsOnly(), TextPrompt("x")) == "prompt"
    assert IdsOnly().tokens.of(5) == b""


@pytest.mark.hostile
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(pool: TemplatePool) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    prompt = TextPrompt("a" * (BASE.max_model_len * MAX_CHARS_PER_TOKEN + 1))
    with pytest.raises(InvalidRequest, match="maximum context length is 512") as caught:
        await tokenizer.encode(prompt, BASE)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.hostile
@pytest.mark.parametrize("truncation", [None, Truncation(1 << 20, keeps_end=True)])
async def test_event_loop_goes_on_while_a_long_text_is_tokenized(
    pool: TemplatePool, truncation: Truncation | None
) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    base = ServedModel("base", VOCAB_SIZE, 1 << 20)
    text = "hello world, " * 60_000
    encoding = asyncio.create_task(tokenizer.encode(TextPrompt(text), base, truncation=truncation))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 10, "with the GIL held there are two or three"
    assert await encoding == (BOS_ID, *text.encode())


@pytest.mark.hostile
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_prompts_that_were_answered_leave_little_memory_behind(pool: TemplatePool) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    before = _resident_bytes()
    for number in range(8000):
        await tokenizer.encode(TextPrompt(f"{number:05}" * 50), BASE)
    grown = _resident_bytes() - before
    assert grown < 24 << 20, "all 8,000 take 64 MiB"


async def test_bad_words_are_tokenized_with_and_without_a_space_before(pool: TemplatePool) -> None:
    tokenizer = BaseTokenizer(tokenizer_files(), pool)
    assert await tokenizer.words(["hi", " hi", "x"]) == {
        tuple(b"hi"),
        tuple(b" hi"),
        tuple(b"x"),
        tuple(b" x"),
    }
    assert await tokenizer.words([]) == await IdsOnly().words([]) == set()
    with pytest.raises(InvalidRequest, match="bad_words"):
        await IdsOnly().words(["hi"])
