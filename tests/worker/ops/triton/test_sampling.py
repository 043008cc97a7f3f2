"""The seeded draw under Triton's interpreter (or on a GPU) against torch."""

import pytest
import torch
import triton
import triton.language as tl

from loraplex_services.worker.ops.sampling.reference import gumbel_scalar
from loraplex_services.worker.ops.sampling.triton import (
    BLOCK_TOKENS,
    JOINED_BLOCKS,
    SLACK,
    argmax,
    best,
    draw,
    most_gumbel,
)
from loraplex_services.worker.ops.sampling.triton import gumbel as gumbel_of
from loraplex_services.worker.sampling import drawing
from loraplex_services.worker.sampling.philox import gumbel, log_tables

SEEDS = (0, 3, -1, -(2**63), 2**63 - 1)


@triton.jit
def noise_kernel(exact, most, words, inverses, logs, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + i).to(tl.uint32)
    tl.store(exact + i, gumbel_of(word, inverses, logs))
    tl.store(most + i, most_gumbel(word))


def keys_of(device, num_rows):
    rows = [[SEEDS[i % len(SEEDS)], 7 * i, i % 3] for i in range(num_rows)]
    return torch.tensor(rows, device=device)


def expected_tokens(scores, keys):
    ids = torch.arange(scores.shape[1], device=scores.device)
    seeds, positions, samples = (column[:, None] for column in keys.T)
    noise = gumbel(seeds, ids.expand_as(scores), positions, samples)
    return (scores + noise).argmax(dim=-1)


@pytest.mark.parametrize(
    ("num_tokens", "scale"),
    [(1, 3.0), (97, 0.0), (97, 40.0), (BLOCK_TOKENS, 3.0), (3 * BLOCK_TOKENS + 5, 3.0)],
)
def test_tokens_are_those_of_torch(device, num_tokens, scale):
    generator = torch.Generator().manual_seed(num_tokens)
    scores = (torch.randn(12, num_tokens, generator=generator) * scale).to(device)
    scores[1, num_tokens // 2 :] = -torch.inf
    scores[1, 0] = 1.0
    keys = keys_of(device, len(scores))
    assert draw(scores, keys).equal(expected_tokens(scores, keys))


@pytest.mark.parametrize(
    "num_tokens", [1, 97, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 5, (JOINED_BLOCKS + 2) * BLOCK_TOKENS]
)
def test_the_best_token_is_the_first_of_the_highest_score(device, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randint(0, 9, (5, num_tokens), generator=generator).float()
    scores[1, -1] = 9.0
    scores[2, : num_tokens // 2] = -torch.inf
    scores[3] = -torch.inf
    first = [row.tolist().index(row.max()) for row in scores]
    highest, tokens = best(scores.to(device))
    assert highest.tolist() == scores.amax(dim=-1).tolist()
    assert tokens.tolist() == first
    assert argmax(scores.to(device)[:, : num_tokens // 2 + 1]).max() <= num_tokens // 2


def test_a_row_that_is_not_a_number_has_a_token_of_its_own(device):
    scores = torch.full((2, BLOCK_TOKENS + 3), torch.nan, device=device)
    scores[1, 5] = 1.0
    assert (argmax(scores) < scores.shape[1]).all()


def test_noise_decides_between_two_tokens_as_published(device):
    keys = keys_of(device, len(SEEDS))
    for i, seed in enumerate(SEEDS):
        first, second = (gumbel_scalar(seed & (2**64 - 1), t, 7 * i, i % 3) for t in (5, 900))
        for nudge, winner in ((1e-4, 900), (-1e-4, 5)):
            scores = torch.full((1, 1000), -torch.inf, device=device)
            scores[0, 5], scores[0, 900] = 0.0, first - second + nudge
            assert draw(scores, keys[i : i + 1]).tolist() == [winner]


def test_ties_and_rows_without_any_token_take_the_lowest_id(device):
    scores = torch.full((1, BLOCK_TOKENS + 9), -torch.inf, device=device)
    assert draw(scores, keys_of(device, 1)).tolist() == [0]


def test_columns_of_a_row_have_the_noise_of_their_tokens(device):
    scores, keys = torch.zeros(9, 3000, device=device), keys_of(device, 9)
    for begin, end in ((1, 70), (777, 2900)):
        part = scores[:, begin:end].contiguous()
        expected = drawing.draw(part.cpu(), keys.cpu(), begin)
        assert draw(part, keys, begin).cpu().equal(expected)


def test_no_noise_is_above_the_bound_that_blocks_are_skipped_by(device):
    ends = torch.arange(2048)
    words = torch.cat((ends, 2**31 + ends - 1024, 2**32 - 2048 + ends))
    words = torch.cat((words, torch.randint(2**32, (2048,)))).to(device)
    exact, most = (torch.empty(len(words), device=device) for _ in range(2))
    noise_kernel[(4,)](exact, most, words, *log_tables(words.device), BLOCK=2048)
    assert (exact <= most + SLACK.value / 2).all()
    assert (most - exact)[exact > 3].max() < 0.1


@pytest.mark.long
def test_a_token_far_below_the_best_wins_where_its_noise_is_high_enough(device):
    """Blocks apart, and by so little that a bound on the noise that is too low would skip it."""
    seeds = torch.arange(200)
    keys = torch.stack((seeds, seeds * 0 + 4, seeds * 0), 1).to(device)
    far = 2 * BLOCK_TOKENS + 7
    noises = [[gumbel_scalar(int(seed), token, 4, 0) for token in (3, far)] for seed in seeds]
    for nudge, winner in ((1e-4, far), (-1e-4, 3)):
        scores = torch.full((200, far + 2), -torch.inf)
        scores[:, 3] = 0.0
        scores[:, far] = torch.tensor([first - second + nudge for first, second in noises])
        assert draw(scores.to(device), keys).tolist() == [winner] * 200
