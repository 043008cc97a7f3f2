"""The noise recipe: published vectors, own vectors, scalar truth against torch, distribution."""

import hashlib
import math
import random

import pytest
import torch

from loraplex_services.worker.ops.sampling.reference import draw as draw_by_token
from loraplex_services.worker.ops.sampling.reference import gumbel_scalar, philox_scalar
from loraplex_services.worker.sampling import fixed_log
from loraplex_services.worker.sampling.drawing import draw
from loraplex_services.worker.sampling.philox import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    gumbel,
    ln_fixed,
    philox,
)

ONES = 0xFFFFFFFF
# Known-answer vectors that Random123 publishes for philox4x32-10: (counter, key, words).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

TABLES_SHA256 = "0fdc3a17fdc0a399525ffaf622ee399f4358df2339c62e65905e8c8c29fce49a"
NOISE_VECTORS = [  # (seed, token id, output position, sample index), noise * 2**24
    ((0, 0, 0, 0), 1423047),
    ((42, 0, 0, 0), 11986668),
    ((42, 1, 0, 0), 73710720),
    ((42, 0, 1, 0), -4939080),
    ((42, 0, 0, 1), -25600434),
    ((18446744073709551615, 151935, 4095, 7), 9013223),
    ((81985529216486895, 31999, 17, 2), 23705336),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_scalar_philox_gives_the_published_words(counter, key, words):
    assert philox_scalar(counter, key) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_torch_philox_gives_the_published_words(counter, key, words):
    out = philox(
        tuple(torch.tensor([word]) for word in counter),
        tuple(torch.tensor([word]) for word in key),
    )
    assert tuple(int(word) for word in out) == words


def test_tables_of_the_logarithm_never_change():
    text = repr((fixed_log.LN2, fixed_log.INVERSES, fixed_log.LOGS))
    assert hashlib.sha256(text.encode()).hexdigest() == TABLES_SHA256


@pytest.mark.parametrize(("arguments", "noise_bits"), NOISE_VECTORS)
def test_noise_vectors_never_change(arguments, noise_bits):
    assert gumbel_scalar(*arguments) * 2**24 == noise_bits


def test_fixed_logarithm_is_close_to_the_real_one():
    rng = random.Random(1)
    values = [rng.randrange(1, 1 << rng.randrange(1, 45)) for _ in range(20_000)]
    worst = max(abs(fixed_log.ln_fixed(v) / 2**38 - math.log(v)) for v in values)
    assert worst < 2**-33


def test_torch_logarithm_equals_the_scalar_one_bit_for_bit():
    rng = random.Random(2)
    values = [1, 2, 3, (1 << 44) - 1, 1 << 43]
    values += [rng.randrange(1, 1 << rng.randrange(1, 45)) for _ in range(5_000)]
    expected = [fixed_log.ln_fixed(v) for v in values]
    assert ln_fixed(torch.tensor(values)).tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, -1, -(2**63)])
def test_torch_noise_equals_the_scalar_truth_bit_for_bit(seed):
    ids = torch.arange(0, 200_000, 331)
    noise = gumbel(torch.tensor(seed), ids, torch.tensor(77), torch.tensor(3))
    expected = [gumbel_scalar(seed & (2**64 - 1), int(i), 77, 3) for i in ids]
    assert noise.dtype == torch.float32
    assert noise.tolist() == expected


def test_draws_are_those_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(24, 120, generator=generator) * 3
    scores[:, 100:] = -torch.inf
    scores[5:8] = 0.0
    seeds = (0, 9, -1, 2**63 - 1, -(2**63))
    keys = torch.tensor([[seeds[i % 5], 11 * i, i % 4] for i in range(24)])
    expected = draw_by_token(scores, keys)
    assert draw(scores, keys).tolist() == expected
    assert len(set(expected)) > 12, "noise decides"


def test_noise_is_gumbel_distributed():
    ids = torch.arange(200_000)
    noise = gumbel(torch.tensor(5), ids, torch.tensor(0), torch.tensor(0)).double().sort().values
    theory = torch.exp(-torch.exp(-noise))
    empirical = (torch.arange(len(noise)) + 0.5) / len(noise)
    assert (theory - empirical).abs().max() < 1.63 / math.sqrt(len(noise))  # KS at 1%


def test_noise_stays_inside_its_published_bounds():
    def noise_of_word(word):
        exponential = 33 * fixed_log.LN2 - fixed_log.ln_fixed(2 * word + 1)
        return (38 * fixed_log.LN2 - fixed_log.ln_fixed(exponential)) / 2**38

    assert noise_of_word(0) > GUMBEL_MIN
    assert noise_of_word(2**32 - 1) < GUMBEL_MAX


@pytest.mark.parametrize("changed", range(4))
def test_noise_depends_on_each_of_its_arguments(changed):
    arguments = [7, 8, 9, 1]
    before = gumbel_scalar(*arguments)
    arguments[changed] += 1
    assert gumbel_scalar(*arguments) != before
