"""Classifiers and embedding adapters as PEFT saves them: uploaded, scored, embedded, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loraplex import BlockingInference, Credentials
from loraplex.errors import InvalidRequest
from tests.e2e.stack import BASE, BASE_ID, Stack

TEXTS = ["hello", "is it good?", "x" * 90]
LABELS = {"0": "bad", "1": "fair", "2": "good"}
PAD = 7
MAX_ERROR = 1e-4


@dataclass(frozen=True)
class Tuned:
    """PEFT's models alongside the stack that serves them."""

    stack: Stack
    judge: Any
    embedder: Any


def tune(kind: str, folder: Path, num_labels: int = 2, **fields: object) -> Any:
    """A random adapter on the demo base, saved as PEFT saves it."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    maker = getattr(transformers, kind)
    labels = {"num_labels": num_labels} if "Sequence" in kind else {}
    model = maker.from_pretrained(BASE, dtype=torch.float32, **labels)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], **fields)
    tuned = peft.get_peft_model(model, lora).eval()
    for name, parameter in tuned.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    tuned.save_pretrained(folder)
    return tuned


def ids_of(text: str) -> Any:
    import torch
    from transformers import AutoTokenizer

    return torch.tensor([AutoTokenizer.from_pretrained(BASE)(text)["input_ids"]])


@pytest.fixture(scope="module")
def tuned(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    root = tmp_path_factory.mktemp("scores")
    judge = tune(
        "AutoModelForSequenceClassification", root / "judge", 3, task_type="SEQ_CLS", use_dora=True
    )
    embedder = tune("AutoModel", root / "embedder", task_type="FEATURE_EXTRACTION")
    config = root / "judge" / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"id2label": LABELS, "pad_token_id": PAD})
    )
    stack.publish(root / "judge", root / "embedder")
    yield Tuned(stack, judge, embedder)
    for name in ("judge", "embedder"):  # others ask any adapter of the stack for output
        stack.run_registry("delete", name, "--all")


@pytest.fixture
def client(tuned: Tuned) -> Iterator[BlockingInference]:
    with BlockingInference(tuned.stack.grpc, Credentials()) as made:
        yield made


def expected_scores(tuned: Tuned) -> list[tuple[list[float], list[float]]]:
    """Logits and probabilities of transformers."""
    import torch

    with torch.inference_mode():
        logits = [tuned.judge(ids_of(text)).logits[0] for text in TEXTS]
    return [(row.tolist(), row.softmax(-1).tolist()) for row in logits]


def test_scores_are_those_of_transformers_and_peft(tuned: Tuned, client: BlockingInference) -> None:
    scores = client.score("judge", TEXTS)
    assert scores.labels == tuple(LABELS.values())
    assert scores.served_by.adapters == ("default/judge:v1",)
    for score, (logits, probabilities) in zip(scores.scores, expected_scores(tuned), strict=True):
        assert score.logits == pytest.approx(logits, abs=MAX_ERROR)
        assert score.probabilities == pytest.approx(probabilities, abs=MAX_ERROR)
        assert score.label == list(LABELS.values())[logits.index(max(logits))]


def test_classify_answers_in_the_shape_of_vllm(tuned: Tuned) -> None:
    status, answer = tuned.stack.post("/classify", {"model": "judge", "input": TEXTS})
    assert status == 200, answer
    want = expected_scores(tuned)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    for entry, (logits, probabilities) in zip(answer["data"], want, strict=True):
        assert entry["probs"] == pytest.approx(probabilities, abs=MAX_ERROR)
        assert entry["logits"] == pytest.approx(logits, abs=MAX_ERROR)
        assert (entry["num_classes"], entry["label"] in LABELS.values()) == (3, True)
    raw = {"model": "judge", "input": TEXTS[0], "use_activation": False}
    status, answer = tuned.stack.post("/classify", raw)
    assert answer["data"][0]["probs"] == pytest.approx(want[0][0], abs=MAX_ERROR)
    assert answer["usage"]["prompt_tokens"] == ids_of(TEXTS[0]).shape[1]


def test_vectors_of_an_embedding_adapter_are_pooled_as_asked(
    tuned: Tuned, client: BlockingInference
) -> None:
    import torch

    with torch.inference_mode():
        states = [tuned.embedder(ids_of(text)).last_hidden_state[0] for text in TEXTS]
    means = client.embed("embedder", TEXTS, pooling="mean", normalize=False)
    for vector, state in zip(means.vectors, states, strict=True):
        assert vector == pytest.approx(state.mean(dim=0).tolist(), abs=MAX_ERROR)
    short = client.embed("embedder", TEXTS, dimensions=8)
    for vector, state in zip(short.vectors, states, strict=True):
        want = state[-1, :8] / state[-1, :8].norm()
        assert vector == pytest.approx(want.tolist(), abs=MAX_ERROR)
    body = {"model": "embedder", "input": TEXTS, "pooling": "mean", "dimensions": 8}
    status, answer = tuned.stack.post("/v1/embeddings", body)
    assert status == 200, answer
    for entry, state in zip(answer["data"], states, strict=True):
        want = state.mean(dim=0)[:8]
        assert entry["embedding"] == pytest.approx((want / want.norm()).tolist(), abs=MAX_ERROR)


def test_padding_at_the_end_of_a_prompt_is_not_scored(
    tuned: Tuned, client: BlockingInference
) -> None:
    ids = ids_of(TEXTS[0])[0].tolist()
    plain, padded = client.score("judge", [ids, [*ids, PAD, PAD]])
    assert padded.logits == plain.logits


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": "judge", "prompt": "a"}, "model"),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, "model"),
        ("/classify", {"model": "embedder", "input": "a"}, "model"),
        ("/classify", {"model": BASE_ID, "input": "a"}, "model"),
        ("/classify", {"model": "judge", "input": ""}, "input"),
        ("/v1/embeddings", {"model": "judge", "input": "a", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"model": "judge", "input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"model": "judge", "input": "a", "dimensions": 9999}, "dimensions"),
    ],
)
def test_what_an_adapter_was_not_trained_for_is_refused_by_name(
    tuned: Tuned, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = tuned.stack.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_generating_with_a_classifier_is_refused_over_grpc(client: BlockingInference) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.complete("judge", "a")
    assert caught.value.violations[0].field == "model"
