"""Text out of ids: any way of cutting gives the same text, and never half a character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from loraplex_services.gateway.text.detokenize import TokenBytes, decode_all
from tests.gateway.tiny_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer

CORPUS = [
    "the cat sat on the mat",
    "naïve café, 1234 été",
    "日本語のテスト",
    "emoji 😀 done",
] * 4


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("plain word", normalized=False)])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As SentencePiece models come: ▁ for spaces, <0xNN> for what has no token."""
    words = ["▁the", "▁cat", "▁", "s", "é", "日", "▁▁"]
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def _metaspace() -> Tokenizer:
    vocab = [("<unk>", 0.0), ("▁the", -1.0), ("▁c", -2.0), ("at", -2.0), ("▁", -3.0), ("é", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _characters() -> Tokenizer:
    vocab = {char: index for index, char in enumerate("abcé日😀 ")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _wordpiece() -> Tokenizer:
    vocab = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "##é": 4, "!": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "byte-level": _byte_level_bpe(),
    "byte-fallback": _byte_fallback(),
    "metaspace": _metaspace(),
    "characters": _characters(),
    "wordpiece": _wordpiece(),
}
KINDS = sorted(TOKENIZERS)


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids with and without text."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=24)


def _streamed(tokens: TokenBytes, ids: list[int], *, is_start: bool = True) -> list[str]:
    detokenizer = tokens.detokenizer(is_start=is_start)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_equals_the_librarys_where_bytes_are_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(_ids(tokenizer))
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    if kind == "byte-fallback" and "\ufffd" in expected:
        return  # the library gives up on a whole run of bytes, see the test below
    assert "".join(_streamed(TokenBytes(tokenizer), ids)) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_deltas_never_hold_half_a_character(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    text = data.draw(st.text(alphabet="abc é日😀the", max_size=12))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    text_deltas = _streamed(TokenBytes(tokenizer), ids)
    assert not any("\ufffd" in text_delta for text_delta in text_deltas)


@given(raw=st.binary(max_size=12))
def test_any_bytes_come_out_as_replaced_utf8(raw: bytes) -> None:
    bytes_ids, fallback_ids = list(raw), [2 + byte for byte in raw]
    expected = raw.decode("utf-8", "replace")
    assert "".join(_streamed(TokenBytes(TOKENIZERS["bytes"]), bytes_ids)) == expected
    streamed = _streamed(TokenBytes(TOKENIZERS["byte-fallback"]), fallback_ids, is_start=False)
    assert "".join(streamed) == expected


def test_incomplete_character_is_flushed_as_one_replacement() -> None:
    text_deltas = _streamed(TokenBytes(TOKENIZERS["bytes"]), list("a😀".encode()[:-1]))
    assert text_deltas == ["a", "", "", "", "\ufffd"]


def test_continuation_of_a_prompt_keeps_its_first_space() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    tokens, the = TokenBytes(tokenizer), tokenizer.token_to_id("▁the")
    assert "".join(_streamed(tokens, [the], is_start=False)) == " the"
    assert "".join(_streamed(tokens, [the])) == "the"


def test_only_the_first_space_of_a_text_vanishes() -> None:
    space = TOKENIZERS["byte-fallback"].token_to_id("<0x20>")
    assert "".join(_streamed(TokenBytes(TOKENIZERS["byte-fallback"]), [space, space])) == " "


def test_special_tokens_show_only_when_asked() -> None:
    tokens = TokenBytes(TOKENIZERS["bytes"])
    ids = (104, EOS_ID, 105)
    assert decode_all(tokens, ids, skip_special=True) == "hi"
    assert decode_all(tokens, ids, skip_special=False) == "h</s>i"


def test_ids_without_text_print_as_nothing() -> None:
    tokens = TokenBytes(TOKENIZERS["bytes"])
    assert decode_all(tokens, (104, VOCAB_SIZE - 1, 105), skip_special=True) == "hi"
    assert (tokens.texts[VOCAB_SIZE - 1], tokens.of(VOCAB_SIZE - 1)) == ("", b"")


def test_token_that_is_no_utf8_is_shown_by_its_bytes() -> None:
    tokens = TokenBytes(TOKENIZERS["bytes"])
    assert (tokens.texts[0xC3], tokens.of(0xC3)) == ("bytes:\\xc3", b"\xc3")
    assert tokens.texts[ord("a")] == "a"


def test_broken_text_is_not_held_back_without_end() -> None:
    """A decoder that is asked window by window lets go of what never becomes a character."""
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.WordPiece(cleanup=False)]
    )
    assert not TokenBytes(tokenizer).is_exact
    detokenizer = TokenBytes(tokenizer).detokenizer()
    out = "".join(detokenizer.push(2 + 0x80 + index % 64) for index in range(64))
    assert len(out) > 16


def test_decoder_is_read_from_the_tokenizer_itself() -> None:
    assert json.loads(TOKENIZERS["bytes"].to_str())["decoder"]["type"] == "ByteLevel"
    exact = {kind for kind in KINDS if TokenBytes(TOKENIZERS[kind]).is_exact}
    assert exact == {"bytes", "byte-level", "byte-fallback", "metaspace", "characters"}
