"""top_k, top_p and min_p under Triton's interpreter (or on a GPU) against the sorting reference."""

import pytest
import torch

from loraplex_services.worker.ops.sampling.truncation import BLOCK_TOKENS, truncate
from loraplex_services.worker.sampling import masks
from tests.worker.ops.triton.conftest import INTERPRETING

INF = float("inf")
WIDE = BLOCK_TOKENS + 777


def limits_of_kinds(width):
    kinds = [
        (width, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (width - 1, 1.0, 0.0), (width, 0.0, 0.0),
        (width, 0.3, 0.0), (width, 0.95, 0.0), (width, 0.9999, 0.0), (width, 1.0, 0.05),
        (width, 1.0, 1.0), (40, 0.8, 0.0), (40, 0.999, 0.02), (width // 2, 0.9, 0.001),
    ]  # fmt: skip
    return [(max(1, k), p, m) for k, p, m in kinds]


def check(scores, limits, device):
    limits = torch.tensor(limits, dtype=torch.float32)
    expected, found = scores.clone(), scores.clone().to(device)
    masks.truncate(expected, limits)
    truncate(found, limits.to(device))
    differing = (found.cpu() != expected).sum(dim=-1)
    assert differing.tolist() == [0] * len(scores)


KINDS = ("spread", "tied", "deep", "tiny", "masked")


@pytest.mark.parametrize(
    ("width", "kind"),
    [
        *((97, kind) for kind in KINDS),
        *((width, kind) for width in (1, WIDE) for kind in ("tied", "masked")),
        *(pytest.param(1000, kind, marks=pytest.mark.long) for kind in KINDS),
        *(
            pytest.param(width, kind, marks=pytest.mark.long)
            for width in (1, WIDE)
            for kind in ("spread", "deep", "tiny")
        ),
    ],
)
def test_what_is_kept_is_what_sorting_keeps(device, width, kind):
    generator = torch.Generator().manual_seed(width)
    limits = limits_of_kinds(width)
    scores = torch.randn(len(limits), width, generator=generator) * 3
    if kind == "tied":
        scores = scores.round()
        scores[:, ::5] *= -0.0  # zeros of both signs are equal
    elif kind == "deep":
        scores *= 30
    elif kind == "tiny":
        scores *= 1e-39  # below the smallest normal number, and all about equally likely
    elif kind == "masked":
        scores[torch.rand(scores.shape, generator=generator) < 0.97] = -INF
        scores[0], scores[1, 1:] = -INF, -INF
    check(scores, limits, device)


def test_flat_rows_that_no_workspace_holds_are_cut_by_id(device):
    scores = torch.zeros(3, WIDE)
    limits = torch.tensor([[WIDE - 5, 1.0, 0.0], [WIDE, 0.75, 0.0], [WIDE, 1.0, 0.5]])
    found = scores.clone().to(device)
    truncate(found, limits.to(device))
    kept = [torch.nonzero(row > -INF)[:, 0].tolist() for row in found]
    assert kept == [list(range(WIDE - 5)), list(range(-(-WIDE * 3 // 4))), list(range(WIDE))]


def test_candidates_that_overflow_the_workspace_are_searched_in_the_row(device):
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(3, 2 * BLOCK_TOKENS + 3, generator=generator) / 8
    width = scores.shape[1]
    check(scores, [(width, 0.9, 0.0), (width - 100, 0.7, 0.0), (9000, 1.0, 0.0)], device)


def test_rows_of_nan_end(device):
    scores = torch.full((2, 300), float("nan"), device=device)
    scores[1, ::2] = INF
    truncate(scores, torch.tensor([[5.0, 0.9, 0.1]] * 2, device=device))


@pytest.mark.skipif(INTERPRETING, reason="a whole vocabulary takes the interpreter minutes")
@pytest.mark.parametrize("width", [128_256, 151_937])
def test_a_whole_vocabulary_is_cut_as_sorting_cuts_it(device, width):
    generator = torch.Generator().manual_seed(width)
    limits = limits_of_kinds(width)
    scores = torch.randn(len(limits), width, generator=generator) * 3
    check(scores, limits, device)
    check(scores.bfloat16().float(), limits, device)  # many ties
    check(scores / 300, limits, device)  # all about equally likely: the row itself is searched
