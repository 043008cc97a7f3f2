"""Choosing tokens: greedy, seeded, truncated, penalised, masked; and logprobs."""

import math
from dataclasses import replace

import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.ops.sampling.reference import gumbel_scalar
from loraplex_services.worker.sampling import drawing, sampler
from loraplex_services.worker.sampling.edits import edits_of
from loraplex_services.worker.sampling.logprobs import logprob_rows
from loraplex_services.worker.sampling.masks import limits_of, truncate
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.sampler import sample, score_tokens
from loraplex_services.worker.transfers import Upload
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import Sampled

VOCAB = 97
INF = float("inf")


def make_request(output_ids=(), *, sample_index=0, **params):
    params = {"max_tokens": 100, "seed": 7, **params}
    request = Request("r", [1], SamplingParams(**params), sample_index=sample_index)
    request.output_ids = list(output_ids)
    return request


def random_logits(num_rows, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator) * scale


def choose(logits, requests, eos_ids=()):
    rows = torch.arange(len(requests))
    tokens = [token_of(request) for request in requests]
    choices = sample(rows, tokens, lambda rows: logits[rows].clone(), eos_ids)
    token_ids, logprobs = choices.read()
    return [Sampled(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def token_of(request):
    return NextToken(request, len(request.output_ids))


def chosen_ids(logits, requests):
    return [sampled.token_id for sampled in choose(logits, requests)]


def test_temperature_zero_takes_the_argmax_and_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, VOCAB)
    logits[1, [40, 12, 90]] = 5.0
    assert chosen_ids(logits, [make_request(), make_request()]) == [0, 12]


def best_from(known, requests):
    """Chosen tokens where the best ones are known; logits are all equal."""
    tokens = [token_of(request) for request in requests]
    logits = torch.zeros(len(requests), VOCAB)
    choices = sample(
        torch.arange(len(requests)), tokens, lambda rows: logits[rows], (3,), best_of=known
    )
    assert choices.token_ids.tolist() == choices.read()[0]
    return choices.token_ids.tolist()


def test_known_best_tokens_are_taken_where_nothing_else_is_needed(monkeypatch):
    monkeypatch.setattr(sampler, "MAX_LOGIT_ROWS", 2)
    plain = [make_request() for _ in range(3)]
    assert best_from(lambda rows: rows + 40, plain) == [40, 41, 42]
    assert best_from(lambda _: None, plain) == [0, 0, 0]


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"logprobs": 0}, {"bad_token_ids": (5,)}, {"min_tokens": 2}]
)
def test_known_best_tokens_are_not_taken_where_a_neighbour_needs_logits(params):
    found = best_from(lambda rows: rows + 40, [make_request(), make_request(**params)])
    assert found[0] == 0


@pytest.mark.parametrize("seed", [0, 3, 2**63 + 5, 2**64 - 1])
def test_a_draw_is_the_argmax_of_tempered_logits_plus_published_noise(seed):
    logits = random_logits(1, seed=2)
    request = make_request([4, 4, 9], seed=seed, temperature=0.7, sample_index=2)
    scores = [
        torch.tensor(float(logit)) / torch.tensor(0.7) + gumbel_scalar(seed, i, 3, 2)
        for i, logit in enumerate(logits[0])
    ]
    assert chosen_ids(logits, [request]) == [max(range(VOCAB), key=lambda i: float(scores[i]))]


def test_a_draw_does_not_depend_on_its_neighbours():
    logits = random_logits(32, seed=3)
    requests = [make_request(range(i), seed=i % 5, temperature=1.0) for i in range(32)]
    together = chosen_ids(logits, requests)
    alone = [chosen_ids(logits[i : i + 1], [requests[i]])[0] for i in range(32)]
    assert together == alone
    assert len(set(together)) > 5


def test_draws_follow_the_softmax():
    num_draws = 4000
    logits = random_logits(1, seed=4, scale=1.0).expand(num_draws, VOCAB)
    requests = [make_request(seed=seed, temperature=1.3) for seed in range(num_draws)]
    counts = torch.bincount(torch.tensor(chosen_ids(logits, requests)), minlength=VOCAB)
    expected = (logits[0] / 1.3).softmax(-1) * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < VOCAB + 4 * math.sqrt(2 * VOCAB)


def test_skipping_noise_that_cannot_win_changes_no_draw(monkeypatch):
    logits = random_logits(64, seed=5, scale=20.0)
    requests = [make_request(seed=i, temperature=1.0) for i in range(64)]
    pruned = chosen_ids(logits, requests)
    monkeypatch.setattr(drawing, "GUMBEL_MAX", 1e9)
    assert chosen_ids(logits, requests) == pruned


def test_chunks_of_the_vocabulary_work_change_nothing(monkeypatch):
    logits = random_logits(10, seed=6)
    requests = [make_request(seed=i, temperature=1.0, logprobs=2) for i in range(10)]
    complete = choose(logits, requests)
    monkeypatch.setattr(sampler, "MAX_LOGIT_ROWS", 3)
    assert choose(logits, requests) == complete


def kept_ids(logits, **params):
    scaled = torch.tensor([logits], dtype=torch.float32)
    limits = limits_of([SamplingParams(max_tokens=1, seed=0, **params)], len(logits))
    assert limits is not None
    truncate(scaled, torch.from_numpy(limits))
    return torch.nonzero(scaled[0] > -INF)[:, 0].tolist()


def test_top_k_breaks_ties_by_the_lower_id():
    assert kept_ids([1.0, 3.0, 1.0, 3.0, 1.0], top_k=3) == [0, 1, 3]


def test_top_p_keeps_the_token_that_reaches_p():
    logits = [math.log(p) for p in (0.1, 0.5, 0.1, 0.3)]
    assert kept_ids(logits, top_p=0.6) == [1, 3]
    assert kept_ids(logits, top_p=0.45) == [1]
    assert kept_ids(logits, top_p=0.85) == [0, 1, 3]


def test_top_p_looks_at_what_top_k_kept():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept_ids(logits, top_k=2, top_p=0.57) == [0]


def test_min_p_is_relative_to_the_most_likely_token():
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert kept_ids(logits, min_p=0.5) == [0, 1]


def test_something_is_always_kept():
    assert kept_ids([0.0, 0.0, 0.0], top_p=1e-9) == [0]
    assert kept_ids([0.0, 1.0, 0.0], min_p=1.0, top_k=1) == [1]


def test_a_limit_cuts_its_own_row_only():
    logits = random_logits(2, seed=9, scale=1.0)
    requests = [make_request(seed=5, temperature=1.0, top_k=k) for k in (0, 1)]
    for seed in range(50):
        requests[0].sampling = replace(requests[0].sampling, seed=seed)
        together = chosen_ids(logits, requests)
        alone = chosen_ids(logits[:1], requests[:1])
        assert together == [*alone, int(logits[1].argmax())]


def edit_logits(logits, tokens, eos_ids):
    upload = Upload()
    edits = edits_of(tokens, eos_ids, logits.shape[1])
    edits.upload(upload, len(tokens))
    upload.send(logits.device)
    edits.apply(logits, upload)


def edited(logits, request, eos_ids=()):
    rows = torch.tensor([logits], dtype=torch.float32)
    edit_logits(rows, [token_of(request)], eos_ids)
    return rows[0].tolist()


def test_bias_is_added_before_penalties():
    request = make_request([1], logit_bias=((1, 3.0),), repetition_penalty=2.0)
    assert edited([0.0, -1.0, 5.0], request) == [0.0, 1.0, 5.0]


def test_repetition_penalty_moves_seen_tokens_down_whatever_their_sign():
    request = make_request([0, 2, 2], repetition_penalty=2.0)
    assert edited([4.0, 0.0, -4.0, 4.0], request) == [2.0, 0.0, -8.0, 4.0]


def test_frequency_counts_and_presence_does_not():
    request = make_request([0, 0, 1], frequency_penalty=0.5, presence_penalty=0.25)
    assert edited([1.0, 1.0, 1.0], request) == [-0.25, 0.25, 1.0]


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}])
def test_a_token_that_only_the_device_knows_counts_like_any_other(params):
    known, in_flight = make_request([2, 0, 2], **params), make_request([2, 0], **params)
    logits = torch.tensor([[1.0, -2.0, 3.0], [1.0, -2.0, 3.0]])
    edit_logits(
        logits,
        [token_of(known), NextToken(in_flight, 3, follows=1, outputs=torch.tensor([9, 2]))],
        (),
    )
    assert logits[0].equal(logits[1])


def test_a_step_is_not_changed_by_tokens_that_come_meanwhile():
    request = make_request([1, 2], presence_penalty=1.0, temperature=1.0)
    token = token_of(request)
    request.output_ids.append(0)
    logits = torch.zeros(1, 4)
    edit_logits(logits, [token], ())
    assert logits[0].tolist() == [0.0, -1.0, -1.0, 0.0]


def test_only_the_repetition_penalty_looks_at_the_prompt():
    params = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    request = Request("r", [0, 1], SamplingParams(max_tokens=9, seed=0, **params))
    assert edited([1.0, -1.0, 1.0], request) == [0.5, -2.0, 1.0]


def test_allowed_and_bad_tokens_mask_the_rest():
    request = make_request(allowed_token_ids=(1, 2), bad_token_ids=(2,))
    assert edited([1.0, 2.0, 3.0, 4.0], request) == [-INF, 2.0, -INF, -INF]


def test_end_and_stop_tokens_wait_for_min_tokens():
    params = {"min_tokens": 2, "stop_token_ids": (3,)}
    assert edited([1.0] * 4, make_request([7], **params), [0]) == [-INF, 1.0, 1.0, -INF]
    assert edited([1.0] * 4, make_request([7, 7], **params), [0]) == [1.0] * 4


def test_logprobs_are_the_models_own_whatever_was_biased():
    logits = random_logits(1)
    request = make_request(logit_bias=((5, 100.0),), temperature=0.5, logprobs=3)
    (sampled,) = choose(logits, [request])
    raw = logits[0].log_softmax(-1)
    assert sampled.token_id == 5
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(raw[5].item(), abs=1e-6)
    values, ids = raw.topk(3)
    assert [i for i, _ in sampled.logprobs.top] == ids.tolist()
    assert [v for _, v in sampled.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_listed_tokens_replace_the_most_likely_ones():
    """In the order of the request, beside rows that list none or other tokens. The chosen token
    keeps its own entry, and a token of a wider vocabulary has no probability."""
    logits = random_logits(4)
    requests = [
        make_request(logprobs=0, logprob_token_ids=(5, 90, 2)),
        make_request(logprobs=2),
        make_request(logprobs=0, logprob_token_ids=(VOCAB, 0)),
        make_request(),
    ]
    sampled = choose(logits, requests)
    assert sampled[3].logprobs is None
    entries = [row.logprobs for row in sampled[:3]]
    raw = logits.log_softmax(-1)
    assert [c.token_id for c in entries[0].top] == [5, 90, 2]
    assert [c.logprob for c in entries[0].top] == pytest.approx(raw[0, [5, 90, 2]].tolist())
    assert [c.token_id for c in entries[1].top] == raw[1].topk(2).indices.tolist()
    assert entries[2].top == ((VOCAB, -INF), (0, pytest.approx(raw[2, 0].item())))
    assert [e.token_id for e in entries] == logits[:3].argmax(-1).tolist()


def test_logprobs_come_only_where_they_were_asked_for():
    logits = random_logits(2)
    first, second = choose(logits, [make_request(), make_request(logprobs=0)])
    assert first.logprobs is None
    assert second.logprobs is not None
    assert second.logprobs.top == ()


def test_known_tokens_are_scored_in_order():
    logits = random_logits(3)
    (scored,) = score_tokens(torch.arange(3), [9, 8, 7], 1, lambda rows: logits[rows].clone())
    scores = scored.packed().scored()
    expected = logits.log_softmax(-1)
    for row, (score, token_id) in enumerate(zip(scores, [9, 8, 7], strict=True)):
        assert score.token_id == token_id
        assert score.logprob == pytest.approx(expected[row, token_id].item(), abs=1e-6)
        assert score.top[0][0] == int(expected[row].argmax())


def test_a_known_token_has_its_rank_among_all_tokens():
    logits = random_logits(3).round()  # many are equally likely
    logits[2] = 0
    for known in ([0, 1, 2], [9, 8, 7], logits.argmax(-1).tolist()):
        (scored,) = score_tokens(torch.arange(3), known, 1, lambda rows: logits[rows].clone())
        own = logits.gather(1, torch.tensor(known)[:, None])
        assert [entry.rank for entry in scored.packed().scored()] == (logits >= own).sum(
            -1
        ).tolist()


def test_equally_likely_tokens_are_listed_by_id():
    scores = torch.tensor([[0, 2, 1, 2, 2, 0, 1], [0, 0, 0, 0, 0, 0, 3], [1, 1, 1, 1, 1, 1, 1]])
    rows = logprob_rows(scores.float(), torch.tensor([0, 0, 0]), [2, 4, 3])
    listed = [[candidate.token_id for candidate in entry.top] for entry in rows.read()]
    assert listed == [[1, 3], [6, 0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("is_rounded", [False, True], ids=["different", "many-equal"])
@pytest.mark.parametrize("num_top", [1, 7, 63, 64])
def test_top_tokens_are_the_first_of_a_stable_sort(num_top: int, is_rounded: bool) -> None:
    scores = torch.randn(5, 64, generator=torch.Generator().manual_seed(num_top))
    scores = scores.round() if is_rounded else scores
    rows = logprob_rows(scores, torch.zeros(5, dtype=torch.long), [num_top] * 5)
    expected = scores.sort(dim=-1, descending=True, stable=True)
    assert rows.top_ids.tolist() == expected.indices[:, :num_top].tolist()
    assert rows.top_values.tolist() == expected.values[:, :num_top].tolist()


def test_rows_that_are_not_numbers_have_top_tokens_beside_rows_that_are():
    scores = torch.tensor([[float("nan")] * 5, [1.0, 3.0, 3.0, 0.0, 2.0]])
    _, entry = logprob_rows(scores, torch.tensor([0, 0]), [2, 2]).read()
    assert [candidate.token_id for candidate in entry.top] == [1, 2]
