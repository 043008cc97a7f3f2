"""Scores of pairs, rankings and pooling: transformers and PEFT agree, and wrong calls are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.stack import BASE, BASE_ID, Stack
from tests.e2e.test_scores import tune

MAX_ERROR = 1e-4
QUERY, TEXTS = "which is red?", ["an apple", "the sea", "a rose " * 8]


@dataclass(frozen=True)
class Ranked:
    """PEFT's cross-encoder and the stack that serves it."""

    stack: Stack
    ranker: Any


@pytest.fixture(scope="module")
def ranked(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    root = tmp_path_factory.mktemp("ranking")
    ranker = tune("AutoModelForSequenceClassification", root / "ranker", 1, task_type="SEQ_CLS")
    tune("AutoModelForSequenceClassification", root / "sorter", 3, task_type="SEQ_CLS")
    stack.publish(root / "ranker", root / "sorter")
    yield Ranked(stack, ranker)
    for name in ("ranker", "sorter"):
        stack.run_registry("delete", name, "--all")


def _expected(
    ranked: Ranked, pairs: list[tuple[str, str]], **truncation: Any
) -> tuple[list[float], int]:
    """The sigmoids of PEFT's logits, and the number of tokens, with the tokenizer's own pairs."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    ids = [torch.tensor([tokenizer(a, b, **truncation)["input_ids"]]) for a, b in pairs]
    with torch.inference_mode():
        scores = [ranked.ranker(each).logits[0].sigmoid().item() for each in ids]
    return scores, sum(each.shape[1] for each in ids)


def _ok(stack: Stack, path: str, **fields: object) -> Any:
    status, answer = stack.post(path, fields)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_of_pairs_are_those_of_peft(ranked: Ranked, names: tuple[str, str]) -> None:
    first, second = names
    fields: dict[str, object] = {first: QUERY, second: TEXTS}
    answer = _ok(ranked.stack, "/v1/score", model="ranker", **fields)
    want, num_tokens = _expected(ranked, [(QUERY, text) for text in TEXTS])
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=MAX_ERROR)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == num_tokens
    paired: dict[str, object] = {first: TEXTS, second: TEXTS[::-1]}
    answer = _ok(ranked.stack, "/score", model="ranker", **paired)
    want, _ = _expected(ranked, list(zip(TEXTS, TEXTS[::-1], strict=True)))
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=MAX_ERROR)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_ranking_is_best_first(ranked: Ranked, path: str) -> None:
    want, _ = _expected(ranked, [(QUERY, text) for text in TEXTS])
    order = sorted(range(3), key=lambda index: -want[index])
    fields: dict[str, object] = {"model": "ranker", "query": QUERY}
    answer = _ok(ranked.stack, path, **fields, documents=[{"text": TEXTS[0]}, *TEXTS[1:]])
    assert [each["index"] for each in answer["results"]] == order
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == pytest.approx([want[index] for index in order], abs=MAX_ERROR)
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[i] for i in order]
    short = _ok(ranked.stack, path, **fields, documents=TEXTS, top_n=1, return_documents=False)
    [best] = short["results"]
    assert best == {
        "index": order[0],
        "relevance_score": pytest.approx(want[order[0]], abs=MAX_ERROR),
    }


def test_long_pairs_are_truncated_as_by_transformers(ranked: Ranked) -> None:
    pairs = [(QUERY, text) for text in TEXTS]
    want, num_tokens = _expected(ranked, pairs, truncation=True, max_length=24)
    fields: dict[str, object] = {"model": "ranker", "truncate_prompt_tokens": 24}
    answer = _ok(ranked.stack, "/v1/score", **fields, text_1=QUERY, text_2=TEXTS)
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=MAX_ERROR)
    assert answer["usage"]["prompt_tokens"] == num_tokens
    fields = {"model": "ranker", "truncate_prompt_tokens": -1}
    answer = _ok(ranked.stack, "/v1/rerank", **fields, query=QUERY, documents=["a" * 2000])
    assert answer["usage"]["prompt_tokens"] == 512


def test_without_a_head_a_score_is_the_cosine_of_the_embeddings(ranked: Ranked) -> None:
    scores = _ok(ranked.stack, "/v1/score", model=BASE_ID, text_1=QUERY, text_2=TEXTS)["data"]
    embedded = _ok(ranked.stack, "/v1/embeddings", model=BASE_ID, input=[QUERY, *TEXTS])["data"]
    query, *texts = [each["embedding"] for each in embedded]
    want = [sum(a * b for a, b in zip(query, text, strict=True)) for text in texts]
    assert [each["score"] for each in scores] == pytest.approx(want, abs=MAX_ERROR)


def test_pooling_classifies_or_embeds(ranked: Ranked) -> None:
    classes = _ok(ranked.stack, "/pooling", model="sorter", input=TEXTS)["data"]
    want = _ok(ranked.stack, "/classify", model="sorter", input=TEXTS)["data"]
    for each, other in zip(classes, want, strict=True):
        assert each["data"] == pytest.approx(other["probs"], abs=MAX_ERROR)
    vectors = _ok(ranked.stack, "/pooling", model=BASE_ID, input=TEXTS)["data"]
    embedded = _ok(ranked.stack, "/v1/embeddings", model=BASE_ID, input=TEXTS)["data"]
    for each, other in zip(vectors, embedded, strict=True):
        assert each["data"] == pytest.approx(other["embedding"], abs=MAX_ERROR)
    for fields in ({"encoding_format": "base64"}, {"task": "embed", "encoding_format": "base64"}):
        answer = _ok(ranked.stack, "/pooling", model=BASE_ID, input="a", **fields)
        assert isinstance(answer["data"][0]["data"], str)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["", "b"]}, "text_2[0]"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "mood": "c"}, "mood"),
        ("/v1/score", {"model": "sorter", "text_1": "a", "text_2": "b"}, "model"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 1025}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "max_chunks"),
        ("/pooling", {"model": "sorter", "input": "a", "task": "token_embed"}, "task"),
        ("/pooling", {"model": "ranker", "input": "a", "dimensions": 3}, "dimensions"),
        ("/pooling", {"model": BASE_ID, "input": "a", "task": "classify"}, "model"),
    ],
)
def test_what_is_wrong_or_not_served_is_named(
    ranked: Ranked, path: str, fields: dict[str, Any], param: str
) -> None:
    status, answer = ranked.stack.post(path, {"model": "ranker"} | fields)
    assert status == 400, answer
    assert answer["error"]["param"].startswith(param)


def test_an_unknown_model_is_not_found(ranked: Ranked) -> None:
    for path in ("/v1/score", "/v1/rerank", "/pooling"):
        fields = {"text_1": "a", "text_2": "b"} if path == "/v1/score" else {"query": "a"}
        fields = {"input": "a"} if path == "/pooling" else fields
        body = {"model": "nobody", **fields, **({"documents": ["b"]} if "rerank" in path else {})}
        assert ranked.stack.post(path, body)[0] == 404
