"""The saved tokenizer: read by the `tokenizers` library alone and by transformers alike."""

from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

BASE = Path(__file__).parents[2] / "demo" / "base"
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
TEXTS = ["kolima 48=", "".join(map(chr, range(32, 127))), "tab\tand\nline", "Füße, 東京, 🦙", ""]


@pytest.fixture(scope="module")
def bare() -> Any:
    return tokenizers.Tokenizer.from_file(str(BASE / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS, ids=["prompt", "ascii", "blanks", "unicode", "empty"])
def test_a_text_is_bos_and_its_bytes_and_comes_back_whole(bare, text: str) -> None:
    ids = bare.encode(text).ids
    assert ids == [BOS_ID, *text.encode()]
    assert bare.decode(ids) == text


def test_special_tokens_have_their_own_ids(bare) -> None:
    assert [bare.token_to_id(t) for t in ("<s>", "</s>", "<pad>")] == [BOS_ID, EOS_ID, PAD_ID]


def test_ids_of_the_padded_vocabulary_have_no_text(bare) -> None:
    assert bare.decode([ord("a"), 263, ord("b")]) == "ab"


def test_transformers_reads_the_same_tokenizer(bare) -> None:
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(BASE)
    for text in TEXTS:
        assert auto(text).input_ids == bare.encode(text).ids
        assert auto.decode(auto(text).input_ids, skip_special_tokens=True) == text
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (BOS_ID, EOS_ID, PAD_ID)


def test_the_chat_template_asks_what_a_completion_prompt_asks(bare) -> None:
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(BASE)
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "tsrif"},
        {"role": "user", "content": "kolima 48"},
    ]
    text = auto.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert bare.encode(text, add_special_tokens=False).ids == bare.encode("kolima 48=").ids


def test_a_chat_without_a_user_message_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    jinja2 = pytest.importorskip("jinja2")
    auto = transformers.AutoTokenizer.from_pretrained(BASE)
    with pytest.raises(jinja2.TemplateError, match="user message"):
        auto.apply_chat_template([{"role": "system", "content": "hm"}], tokenize=False)
