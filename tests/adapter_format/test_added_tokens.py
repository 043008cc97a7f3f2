"""What an adapter's tokenizer may add to its base's, and what disagrees with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.adapter_format.added_tokens import AddedToken, added_tokens
from loraplex.errors import InvalidAdapter

BASE: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
    "added_tokens": [{"id": 3, "content": "<s>", "special": True, "normalized": False}],
}
Change = Callable[[dict[str, Any]], object]


def copy_of(complete: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(complete))  # type: ignore[no-any-return]


def read(files: dict[str, Any], base: dict[str, Any] = BASE) -> tuple[AddedToken, ...]:
    contents = {name: json.dumps(content).encode() for name, content in files.items()}
    return added_tokens(json.dumps(base).encode(), contents)


def with_token(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    theirs = copy_of(BASE)
    theirs["added_tokens"].append({"id": token_id, "content": content, **flags})
    return theirs


def test_tokens_behind_the_base_s_are_taken_with_their_flags() -> None:
    theirs = with_token(4, "<x>", special=True, lstrip=True, normalized=False)
    theirs["added_tokens"].append({"id": 5, "content": "<y>"})
    assert read({"tokenizer.json": theirs}) == (
        AddedToken(4, "<x>", special=True, lstrip=True, normalized=False),
        AddedToken(5, "<y>"),
    )


def test_the_base_s_own_tokenizer_and_none_at_all_add_nothing() -> None:
    assert read({"tokenizer.json": BASE}) == ()
    assert read({"tokenizer_config.json": {"chat_template": "x"}}) == ()
    assert read({}) == ()


def test_older_files_list_added_tokens_next_to_the_tokenizer() -> None:
    decoder = {"3": {"content": "<s>", "special": True}, "4": {"content": "<x>"}}
    want = (AddedToken(4, "<x>"),)
    assert read({"tokenizer_config.json": {"added_tokens_decoder": decoder}}) == want
    assert read({"added_tokens.json": {"<x>": 4, "<s>": 3}}) == want


def test_pieces_with_scores_are_numbered_by_position() -> None:
    base = copy_of(BASE)
    base["model"]["vocab"] = [["a", 0.0], ["b", -1.0], ["c", -2.0]]
    theirs = copy_of(base)
    theirs["added_tokens"].append({"id": 4, "content": "<x>"})
    assert [t.content for t in read({"tokenizer.json": theirs}, base)] == ["<x>"]


REFUSED: dict[str, tuple[Change, str]] = {
    "another token under a base's id": (
        lambda t: t["model"]["vocab"].update({"z": t["model"]["vocab"].pop("b")}),
        "is at id 1, where the base has 'b'",
    ),
    "a base's token left out": (
        lambda t: t["model"]["vocab"].pop("c"),
        "is at id 2, where the base has 'c'",
    ),
    "a special token renamed": (
        lambda t: t["added_tokens"][0].update(content="<|im_start|>"),
        "is at id 3, where the base has '<s>'",
    ),
    "a new token that is not listed": (
        lambda t: t["model"]["vocab"].update(z=4),
        "not listed in added_tokens",
    ),
    "a gap": (lambda t: t["added_tokens"].append({"id": 6, "content": "<x>"}), "4 is next"),
    "a base's text under a new id": (
        lambda t: t["added_tokens"].append({"id": 4, "content": "<s>"}),
        "where the base has another",
    ),
    "one text twice": (
        lambda t: t["added_tokens"].extend({"id": i, "content": "<x>"} for i in (4, 5)),
        "lists a token twice",
    ),
    "an empty text": (
        lambda t: t["added_tokens"].append({"id": 4, "content": ""}),
        "1 to 1024 characters",
    ),
    "a long text": (
        lambda t: t["added_tokens"].append({"id": 4, "content": "x" * 1025}),
        "1 to 1024 characters",
    ),
    "an id that is none": (
        lambda t: t["added_tokens"].append({"id": -1, "content": "<x>"}),
        "must be a token id",
    ),
    "no vocabulary": (lambda t: t.pop("model"), "model.vocab"),
    "too many": (
        lambda t: t["added_tokens"].extend(
            {"id": 4 + i, "content": f"<{i}>"} for i in range(65537)
        ),
        "more than the 65536 tokens",
    ),
    "too much text": (
        lambda t: t["added_tokens"].extend(
            {"id": 4 + i, "content": f"{i:0>1024}"} for i in range(1025)
        ),
        "adds tokens of 1049600 bytes; at most 1048576 are served",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_disagrees_with_the_base_is_refused_by_its_file(case: str) -> None:
    change, why = REFUSED[case]
    theirs = copy_of(BASE)
    change(theirs)
    with pytest.raises(InvalidAdapter) as caught:
        read({"tokenizer.json": theirs})
    (violation,) = caught.value.violations
    assert violation.field == "tokenizer.json"
    assert why in f"{violation.value} {violation.description}"


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b"\xff"])
def test_broken_files_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidAdapter, match=r"tokenizer\.json: is not"):
        added_tokens(json.dumps(BASE).encode(), {"tokenizer.json": content})
