"""The best of ranks' columns is the token that the whole row gives."""

import numpy as np
import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.sampling.best_columns import BestRows, best_columns, best_of_ranks
from loraplex_services.worker.sampling.drawing import (
    TORCH_DRAWS,
    DrawOperators,
    draws_of,
    first_argmax,
    is_drawn,
)
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.sampler import needs_best_only, sample
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.sharding import Shard
from tests.worker.native.isas import ISAS, native

VOCAB = 311
TEMPERATURES = (0.0, 0.7, 1.0, 3.0, 1e-6)


def random_tokens(num_rows: int) -> list[NextToken]:
    tokens = []
    for i in range(num_rows):
        params = SamplingParams(max_tokens=9, seed=7**i, temperature=TEMPERATURES[i % 5])
        request = Request(f"r{i}", [1], params, sample_index=i % 3)
        tokens.append(NextToken(request, 11 * i))
    return tokens


def by_ranks(
    logits: torch.Tensor, tokens: list[NextToken], num_ranks: int, draws: DrawOperators
) -> list[int]:
    drawn = [i for i, token in enumerate(tokens) if is_drawn(token)]
    rows = BestRows(np.array(drawn, dtype=np.int64), draws_of([tokens[i] for i in drawn]))
    pairs = []
    for rank in range(num_ranks):
        begin, end = Shard(rank, num_ranks).vocabulary(logits.shape[1])
        pairs.append(best_columns(logits[:, begin:end].contiguous(), begin, rows, draws))
    return best_of_ranks(torch.cat(pairs, dim=1)).tolist()


@pytest.fixture(params=["torch", *ISAS])
def draws(request: pytest.FixtureRequest) -> DrawOperators:
    if request.param == "torch":
        return TORCH_DRAWS
    compiled = native(request.param)
    return DrawOperators(compiled.truncate, compiled.draw, first_argmax)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0], ids=str)
@pytest.mark.parametrize(("width", "num_ranks"), [(5, 8), (VOCAB, 2), (VOCAB, 4), (3000, 4)])
def test_the_best_of_all_ranks_is_the_sampled_token(draws, width, num_ranks, scale):
    """Five tokens of eight ranks leave ranks without any; flat rows have ties at every border."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(60, width, generator=generator) * scale
    logits[::7] = logits[::7].round()
    tokens = random_tokens(60)
    whole = sample(torch.arange(60), tokens, lambda rows: logits.clone(), (2,), draws)
    assert by_ranks(logits, tokens, num_ranks, draws) == whole.token_ids.tolist()


def test_among_equals_on_two_ranks_the_lowest_token_wins():
    logits = torch.zeros(5, VOCAB)
    logits[:, [155, 156, 300]] = 2.0  # the last of the first rank, two of the second
    logits[1, 155] = -1.0
    tokens = [random_tokens(1)[0]] * 5
    assert by_ranks(logits, tokens, 2, TORCH_DRAWS) == [155, 156, 155, 155, 155]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"temperature": 1.0, "stop_token_ids": (3,)}, True),
        ({"temperature": 1.0, "top_k": VOCAB}, True),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, True),
        ({"temperature": 1.0, "top_k": 3}, False),
        ({"temperature": 1.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "min_p": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
        ({"allowed_token_ids": (3,)}, False),
        ({"bad_token_ids": (3,)}, False),
        ({"bad_sequences": ((3, 4),)}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"min_tokens": 9}, False),
    ],
    ids=str,
)
def test_rows_that_are_truncated_edited_or_asked_for_are_gathered(changes, expected):
    params = SamplingParams(max_tokens=20, seed=1, **changes)
    token = NextToken(Request("r", [1], params), 2)
    assert needs_best_only(token, VOCAB) is expected


def test_a_row_with_a_grammar_is_gathered():
    request = Request("r", [1], SamplingParams(max_tokens=20, seed=1))
    request.constraint = object()
    assert not needs_best_only(NextToken(request, 0), VOCAB)
