"""Edits of all rows at once against one row at a time in plain Python."""

import random

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.sampling.edits import edits_of
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.output_counts import OutputCounts
from loraplex_services.worker.transfers import Upload
from loraplex_services.worker.types.request import Request

VOCAB = 61
EOS_IDS = (5, 6)
INF = float("inf")


class Bits:
    """A grammar that allows the tokens of a set; tokens from 48 on have no bit."""

    is_ready, is_finished = True, False

    def __init__(self, allowed):
        self.allowed = allowed

    def bitmask(self):
        bits = [token in self.allowed for token in range(48)]
        return np.packbits(bits, bitorder="little").tobytes()


def random_request(rng: random.Random) -> Request:
    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    def some_ids():
        return tuple(rng.sample(range(VOCAB), rng.randint(1, 9)))

    output_ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]
    params = SamplingParams(
        max_tokens=99,
        seed=0,
        min_tokens=maybe(rng.randrange(12), 0),
        stop_token_ids=maybe(some_ids(), ()),
        repetition_penalty=maybe(1.7, 1.0),
        presence_penalty=maybe(0.3, 0.0),
        frequency_penalty=maybe(-0.4, 0.0),
        logit_bias=maybe(tuple((i, rng.uniform(-9, 9)) for i in some_ids()), ()),
        allowed_token_ids=maybe(some_ids(), ()),
        bad_token_ids=maybe(some_ids(), ()),
        bad_sequences=maybe(bad_sequences(rng, output_ids), ()),
    )
    request = Request("r", [1, 2], params)
    request.output_ids = output_ids
    if rng.random() < 0.3:
        request.constraint = Bits(set(rng.sample(range(VOCAB), 30)))
    return request


def bad_sequences(rng: random.Random, output_ids: list[int]) -> tuple[tuple[int, ...], ...]:
    """Of 2 to 5 tokens: what continues the output, the prompt and output, and nothing."""
    ends = [output_ids[-n:] for n in (1, 1, 2, 4) if len(output_ids) >= n]
    others = [rng.choices(range(VOCAB), k=n) for n in (1, 2, 3)]
    last = rng.randrange(VOCAB)  # forbidden after one end, allowed after others
    spans = [(*before, last) for before in ([1, 2, *output_ids], *others)]
    return tuple([*spans, *((*before, rng.randrange(VOCAB)) for before in ends)])


def expected_row(row: list[float], request: Request) -> list[float]:
    p, seen = request.sampling, request.output_ids
    if isinstance(request.constraint, Bits):
        allowed = {token for token in request.constraint.allowed if token < 48}
        row = [value if i in allowed else -INF for i, value in enumerate(row)]
    for token, value in p.logit_bias:
        row[token] += value
    repeat = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)
    ids = torch.tensor([[*request.prompt_ids, *seen]])
    row = repeat(ids, torch.tensor([row], dtype=torch.float64))[0].tolist()
    for token in set(seen):
        row[token] -= p.frequency_penalty * seen.count(token) + p.presence_penalty
    if p.allowed_token_ids:
        row = [v if i in p.allowed_token_ids else -INF for i, v in enumerate(row)]
    ending = (*p.stop_token_ids, *EOS_IDS) if len(seen) < p.min_tokens else ()
    for token in (*p.bad_token_ids, *ending):
        row[token] = -INF
    if p.bad_sequences:
        forbid = NoBadWordsLogitsProcessor([list(sequence) for sequence in p.bad_sequences])
        # transformers 5.17 looks for a sequence behind the first token only.
        ids = torch.tensor([[VOCAB, *seen]], dtype=torch.int64)
        row = forbid(ids, torch.tensor([row], dtype=torch.float64))[0].tolist()
    return row


def apply_edits(logits, tokens):
    upload = Upload()
    edits = edits_of(tokens, EOS_IDS, logits.shape[1])
    edits.upload(upload, len(tokens))
    upload.send(logits.device)
    edits.apply(logits, upload)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_edited_as_if_each_were_alone(seed):
    """Every other row's last token is known to the device only."""
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(24)]
    logits = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [expected_row(row.tolist(), r) for row, r in zip(logits, requests, strict=True)]
    outputs = torch.randint(VOCAB, (24,))
    tokens = []
    for i, request in enumerate(requests):
        position = len(request.output_ids)
        if i % 2 and position:
            outputs[i] = request.output_ids.pop()
            tokens.append(NextToken(request, position, follows=i, outputs=outputs))
        else:
            tokens.append(NextToken(request, position))
    apply_edits(logits, tokens)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-6, atol=1e-5)


def test_rows_that_ask_for_nothing_are_left_alone():
    request = Request("r", [1], SamplingParams(max_tokens=9, seed=0))
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    apply_edits(logits, [NextToken(request, 0)] * 2)
    assert logits.equal(before)


def test_tokens_beyond_the_vocabulary_change_no_other_row():
    beyond = (VOCAB, VOCAB + 3)
    params = SamplingParams(
        max_tokens=9,
        seed=0,
        min_tokens=5,
        stop_token_ids=beyond,
        bad_token_ids=beyond,
        bad_sequences=(beyond,),
        allowed_token_ids=(*range(VOCAB), *beyond),
        logit_bias=((VOCAB + 1, 4.0),),
        presence_penalty=1.0,
    )
    request = Request("r", [1], params, own_eos_ids=beyond)
    request.output_ids = list(beyond)
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    apply_edits(logits, [NextToken(request, 1), NextToken(request, 1)])
    assert logits.equal(before)


@pytest.mark.parametrize("prompt", [[], [7, 199, 7, 3]])
def test_counts_follow_an_output_and_start_anew_when_it_is_shorter(prompt):
    counts = OutputCounts(prompt)
    output = [random.Random(3).randrange(200) for _ in range(300)]
    for num_tokens in (0, 1, 2, 150, 151, 300, 7, 8):
        ids, times = counts.count(output, num_tokens)
        found = dict(zip(ids.tolist(), times.tolist(), strict=True))
        seen = prompt + output[:num_tokens]
        assert found == {i: output[:num_tokens].count(i) for i in seen}


def test_an_upload_keeps_dtypes_shapes_and_bits():
    arrays = {
        "a": np.arange(5, dtype=np.uint8),
        "b": np.array([[1, -(2**63)], [2**63 - 1, 0]], dtype=np.int64),
        "c": np.array([1.5, -0.0, np.inf], dtype=np.float32),
        "none": np.empty((0, 3), dtype=np.int64),
        "d": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    upload = Upload()
    for name, array in arrays.items():
        upload.add(name, array)
    upload.send(torch.device("cpu"))
    for name, array in arrays.items():
        assert upload[name].equal(torch.from_numpy(array))
    assert "b" in upload
    assert "e" not in upload
