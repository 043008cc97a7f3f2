"""Scores of pairs of texts."""

from __future__ import annotations

import math
import random

from loraplex_services.gateway.pipeline.embedding import unit
from loraplex_services.gateway.pipeline.ranking import cosine


def test_a_cosine_stays_in_its_range_whatever_rounding_does() -> None:
    draw = random.Random(7)
    vectors = [unit([draw.gauss(0, 1) for _ in range(48)]) for _ in range(200)]
    assert max(math.fsum(value * value for value in vector) for vector in vectors) > 1
    for vector in vectors:
        assert 1 - 1e-12 < cosine(vector, vector) <= 1
        assert -1 <= cosine(vector, [-value for value in vector]) < -1 + 1e-12


def test_a_cosine_that_is_no_number_is_not_taken_for_one() -> None:
    assert math.isnan(cosine([math.nan], [1.0]))
