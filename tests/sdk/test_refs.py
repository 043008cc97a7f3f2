"""References parse to one meaning, and refusals show a spelling that parses."""

import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidRequest
from loraplex.refs import (
    Ref,
    check_name,
    check_tag,
    check_tenant,
    parse_name,
    parse_ref,
    parse_version,
    split_choice,
)

DIGEST = "sha256:" + "0af3" * 16
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,95}", fullmatch=True)
SPELLED = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", fullmatch=True)
TAGS = st.from_regex(r"[a-z0-9_][a-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda tag: not re.fullmatch(r"v[0-9]+", tag)
)


@dataclass(frozen=True)
class Target:
    version: int
    weight: int


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("upper", Ref("default", "upper", tag="latest")),
        ("acme/upper", Ref("acme", "upper", tag="latest")),
        ("upper:prod", Ref("default", "upper", tag="prod")),
        ("upper:v12", Ref("default", "upper", version=12)),
        (f"acme/upper@{DIGEST}", Ref("acme", "upper", digest=DIGEST)),
    ],
)
def test_parses_every_form(text: str, expected: Ref) -> None:
    assert parse_ref(text) == expected


def test_tenant_of_the_caller_is_the_default() -> None:
    assert parse_ref("upper", "acme").tenant == "acme"
    assert parse_name("upper", "acme") == ("acme", "upper")


@given(NAMES, NAMES, TAGS)
def test_printing_and_parsing_are_inverse(tenant: str, name: str, tag: str) -> None:
    for ref in (
        Ref(tenant, name, tag=tag),
        Ref(tenant, name, version=7),
        Ref(tenant, name, digest=DIGEST),
    ):
        assert parse_ref(str(ref)) == ref


@given(SPELLED)
def test_names_are_the_same_in_upper_and_lower_case(name: str) -> None:
    assert check_name(name) == name
    assert parse_name(name) == parse_name(name.swapcase()) == ("default", name.lower())
    assert parse_ref(f"{name}:prod") == parse_ref(f"{name.upper()}:prod")


@pytest.mark.parametrize("tenant", ["Acme", "a b", "", "-a", "a/b", "t" * 97])
def test_tenants_are_in_lower_case(tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="try '"):
        check_tenant(tenant)


@given(st.text(max_size=120))
def test_any_text_parses_or_is_refused_naming_the_field(text: str) -> None:
    try:
        ref = parse_ref(text, field="model")
    except InvalidRequest as error:
        assert [violation.field for violation in error.violations] == ["model"]
    else:
        assert parse_ref(str(ref)) == ref


@given(st.text(max_size=120), st.booleans())
def test_corrected_name_in_a_refusal_parses(text: str, tenanted: bool) -> None:
    spelled = f"a b/{text}" if tenanted else text
    try:
        parse_name(spelled)
    except InvalidRequest as error:
        suggestion = error.violations[0].description.rpartition("try ")[2].strip("'")
        parse_name(suggestion)


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("My Adapter", "'My-Adapter'"),
        ("Acme/Upper", "'acme/Upper'"),
        ("-x", "'x'"),
        ("a/b/c", "'a/b-c'"),
        ("", "'my-adapter'"),
        ("upper:Prod", "'upper:prod'"),
        ("upper:", "'upper:latest'"),
        ("acme/upper:V07", "'acme/upper:v7'"),
        (f"upper@{DIGEST.upper()}", f"'upper@{DIGEST}'"),
    ],
)
def test_shows_the_corrected_spelling(text: str, suggestion: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"try {suggestion}")):
        parse_ref(text)


@pytest.mark.parametrize("selector", [":v1", ":prod", ":", f"@{DIGEST}"])
@pytest.mark.parametrize("name", ["upper", "acme/Upper"])
def test_a_reference_where_a_name_belongs_is_refused_with_the_name(
    name: str, selector: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"without a tag, version or digest; try '{name}'"):
        parse_name(name + selector)
    bare = name.rpartition("/")[2]
    with pytest.raises(InvalidRequest, match=f"without a tag, version or digest; try '{bare}'"):
        check_name(bare + selector)


@pytest.mark.parametrize("text", ["upper:", "upper:Prod", "upper:.x", "upper:" + "t" * 65])
def test_refuses_illegal_tags(text: str) -> None:
    with pytest.raises(InvalidRequest, match="try"):
        parse_ref(text)


@pytest.mark.parametrize("text", ["upper:v0", "upper:v01", "upper:V3", "upper:v12345678901"])
def test_refuses_misspelled_versions(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"try 'upper:v[1-9]"):
        parse_ref(text)


@pytest.mark.parametrize("text", ["upper@", "upper@sha256:12", "upper@sha512:" + "0" * 64])
def test_refuses_illegal_digests(text: str) -> None:
    with pytest.raises(InvalidRequest, match="64 lower-case hex"):
        parse_ref(text)


def test_upper_case_digest_is_refused_with_its_lower_case() -> None:
    with pytest.raises(InvalidRequest, match=f"try 'upper@{DIGEST}'"):
        parse_ref("upper@" + DIGEST.upper())


@pytest.mark.parametrize("selector", ["latest", "v1", "Prod"])
def test_a_digest_after_a_tag_is_refused_with_the_digest_alone(selector: str) -> None:
    with pytest.raises(InvalidRequest, match=f"try 'a/Upper@{DIGEST}'"):
        parse_ref(f"a/Upper:{selector}@{DIGEST}")


def test_tag_may_not_look_like_a_version() -> None:
    with pytest.raises(InvalidRequest, match="always means a version"):
        check_tag("v3")
    assert check_tag("v3-beta") == "v3-beta"


def test_name_check_refuses_a_slash() -> None:
    with pytest.raises(InvalidRequest, match="try 'a-b'"):
        check_name("a/b")
    assert check_name("a.b_c-d") == "a.b_c-d"


def test_version_parses() -> None:
    assert parse_version("v3") == 3


def test_split_is_sticky_and_proportional() -> None:
    targets = [Target(3, 90), Target(4, 10)]
    keys = [f"user-{i}" for i in range(4000)]
    chosen = [split_choice(targets, key).version for key in keys]
    assert chosen == [split_choice(targets, key).version for key in keys]
    assert 300 < chosen.count(4) < 500


def test_shifting_weight_moves_only_the_shifted_share() -> None:
    before, after = [Target(3, 90), Target(4, 10)], [Target(3, 160), Target(4, 40)]
    for i in range(500):
        if split_choice(before, str(i)).version == 4:
            assert split_choice(after, str(i)).version == 4


def test_no_key_means_the_first_side() -> None:
    assert split_choice([Target(3, 1), Target(4, 99)], "").version == 3
