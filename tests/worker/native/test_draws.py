"""Compiled draws and truncation against torch."""

import pytest
import torch

from loraplex_services.worker.sampling import drawing, masks
from tests.worker.native.isas import ISAS, native

INF = float("inf")
WIDTHS = [1, 5, 63, 64, 97, 1000, 40_000]


@pytest.fixture(params=ISAS)
def compiled(request):
    return native(request.param)


def random_scores(num_rows, width, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, width, generator=generator) * scale
    scores[torch.rand(num_rows, width, generator=generator) < 0.2] = -INF
    return scores


def random_keys(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return torch.stack((seeds, torch.arange(num_rows) * 7, torch.arange(num_rows) % 3), dim=1)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e6], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_draw_is_that_of_torch(compiled, width, scale):
    scores, keys = random_scores(17, width, scale), random_keys(17)
    assert compiled.draw(scores, keys).equal(drawing.draw(scores, keys))


def test_columns_of_a_row_have_the_noise_of_their_tokens(compiled):
    scores, keys = torch.zeros(300, 3000), random_keys(300, seed=2)
    for begin, end in ((0, 3000), (1, 70), (777, 2900), (2**31, 2**31 + 200)):
        part = scores[:, : end - begin].contiguous()
        assert compiled.draw(part, keys, begin).equal(drawing.draw(part, keys, begin))


def test_equal_scores_are_drawn_alike_however_the_row_is_cut(compiled):
    """Thousands of draws from flat rows: what is passed over for too little noise matters most."""
    scores, keys = torch.zeros(3000, 500), random_keys(3000, seed=1)
    assert compiled.draw(scores, keys).equal(drawing.draw(scores, keys))


def test_rows_without_a_token_draw_the_first(compiled):
    scores = torch.full((2, 200), -INF)
    scores[1, 150] = -1e30
    assert compiled.draw(scores, random_keys(2)).tolist() == [0, 150]


@pytest.mark.parametrize("limit", [(1, 1, 0), (7, 1, 0), (40, 0.8, 0), (400, 0.9, 0.01)], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_k_are_those_of_torch(compiled, width, limit):
    check_truncation(compiled, width, (min(limit[0], width), *limit[1:]))


@pytest.mark.parametrize("limit", [(0.0, 0), (0.3, 0), (0.95, 0), (1, 0.05), (0.9, 0.002)], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_nucleus_is_that_of_torch(compiled, width, limit):
    check_truncation(compiled, width, (width, *limit))


def check_truncation(compiled, width, limit):
    limits = torch.tensor([limit] * 12, dtype=torch.float32)
    scores = random_scores(12, width, 2.0, seed=3)
    scores[::2] = scores[::2].round()  # ties
    expected, actual = scores.clone(), scores.clone()
    masks.truncate(expected, limits)
    compiled.truncate(actual, limits)
    differing = (actual != expected).sum(dim=-1)
    # Sums of float32 and of float64 may see the crossing of top_p one token apart.
    assert differing.max() <= (1 if limit[1] < 1 else 0), differing
    assert ((actual == scores) | (actual == -INF)).all()


def test_truncation_keeps_ties_of_lower_ids(compiled):
    scores = torch.zeros(2, 1000)
    compiled.truncate(scores, torch.tensor([[10.0, 1.0, 0.0], [1000.0, 0.0105, 0.0]]))
    kept = [torch.nonzero(row > -INF)[:, 0].tolist() for row in scores]
    assert kept == [list(range(10)), list(range(11))]


def test_broken_scores_are_survived(compiled):
    scores = torch.full((3, 300), float("nan"))
    scores[1] = -INF
    scores[2, ::2] = INF
    for limit in ([300.0, 0.9, 0.1], [5.0, 0.9, 0.1]):
        cut = scores.clone()
        compiled.truncate(cut, torch.tensor([limit] * 3))
        assert all(0 <= token < 300 for token in compiled.draw(cut, random_keys(3)).tolist())
