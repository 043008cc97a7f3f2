"""Ranges of sampling parameters, and grammars in each of their forms."""

from __future__ import annotations

import dataclasses
import math

import pytest

from loraplex.api.sampling import RANGES, Grammar, Range, Sampling, SamplingParams

REQUESTED = {field.name for field in dataclasses.fields(Sampling)}
RESOLVED = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", RANGES)
def test_a_parameter_with_a_range_can_be_requested_and_is_off_by_default(name: str) -> None:
    assert name in REQUESTED
    off = RESOLVED[name]
    assert isinstance(off, float)
    assert RANGES[name].fault(off) == ""


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, -math.inf])
def test_a_value_outside_its_range_has_a_fault_that_names_the_range(value: float) -> None:
    assert Range(0.0, 1.0).fault(value) == "must be a number from 0 to 1"
    assert Range(0.0, 1.0, excludes_least=True).fault(value) == "must be above 0 and at most 1"


def test_both_ends_belong_to_a_range_unless_the_lower_one_is_excluded() -> None:
    assert [Range(0.0, 1.0).fault(end) for end in (0.0, 1.0)] == ["", ""]
    assert Range(0.0, 1.0, excludes_least=True).fault(0.0)
    assert Range(-math.inf, math.inf).fault(math.inf)


def test_a_schema_that_is_an_object_is_kept_as_text() -> None:
    grammar = Grammar(json_schema={"type": "object"})
    assert (grammar.form, grammar.texts) == ("json_schema", ('{"type": "object"}',))
    assert grammar == Grammar(json_schema='{"type": "object"}')


def test_a_choice_is_kept_as_a_tuple_and_its_options_are_the_texts() -> None:
    grammar = Grammar(choice=["yes", "no"])
    assert (grammar.form, grammar.texts) == ("choice", ("yes", "no"))
    assert hash(grammar) == hash(Grammar(choice=("yes", "no")))


def test_a_text_where_several_may_be_given_is_one_of_them() -> None:
    sampling = Sampling(stop="end", bad_words="no", grammar=Grammar(choice="yes"))
    assert (sampling.stop, sampling.bad_words) == (("end",), ("no",))
    assert sampling.grammar is not None and sampling.grammar.choice == ("yes",)


def test_an_empty_text_is_a_form_and_two_forms_are_none() -> None:
    assert Grammar(regex="").form == "regex"
    assert Grammar(regex="a", choice=("a",)).form == ""
    assert Grammar(regex="a", choice=("a",)).forms == ("regex", "choice")
