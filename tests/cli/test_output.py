"""What commands print of texts that strangers wrote."""

from __future__ import annotations

import json

import pytest

from loraplex.api.output import ServedBy
from loraplex.cli.output import print_error, print_fields, print_table, version_of
from loraplex.errors import InvalidAdapter, InvalidRequest, Violation

pytestmark = pytest.mark.hostile
FORGED = "a\x1b[2J\nvisibility  public\u202e\x07"


def test_control_characters_of_strangers_are_shown_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_fields({"labels": FORGED, "name": "naïve 日本"})
    print_table(("LABEL",), [(FORGED,)])
    print_error(InvalidRequest.field("label", FORGED, "is wrong"), as_json=False)
    said = capsys.readouterr()
    assert "\\x1b[2J\\n" in said.out
    assert "naïve 日本" in said.out
    assert len(said.out.splitlines()) == 4
    assert len(said.err.splitlines()) == 1
    assert all(c.isprintable() or c == "\n" for c in said.out + said.err)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("q.lora_B", "error: weights:q.lora_B: has no lora_A\n"),
        ("weights:q.lora_B", "error: weights:q.lora_B: has no lora_A\n"),
        ("", "error: weights:q.lora_B: has no lora_A\n"),
        ("lora_B", "error: weights:q.lora_B = lora_B: has no lora_A\n"),
    ],
)
def test_a_value_that_repeats_its_field_is_left_out(
    value: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(InvalidRequest.field("weights:q.lora_B", value, "has no lora_A"), as_json=False)
    assert capsys.readouterr().err == shown


def test_of_violations_that_differ_only_in_numbers_one_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shapes = [Violation.of(f"layers.{n}", [n], f"must be [{n + 1}]") for n in range(3)]
    config = Violation.of("config:r", 0, "must be an integer of at least 1")
    print_error(InvalidAdapter.of([*shapes, config]), as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        "error: layers.0: must be [1] (and 3 more)",
        "  layers.0 = [0]: must be [1] (and others of this kind: see --json)",
        "  config:r = 0: must be an integer of at least 1",
    ]
    print_error(InvalidAdapter.of(shapes), as_json=False)
    assert capsys.readouterr().err.count("\n") == 1
    print_error(InvalidAdapter.of(shapes), as_json=True)
    assert len(json.loads(capsys.readouterr().err)["error"]["violations"]) == 3


def test_an_answer_names_the_version_and_the_digest_that_ran_it() -> None:
    answered = ServedBy(("acme/sql:v12",), ("sha256:ab",), "worker-0", "llama")
    assert version_of(answered) == {
        "name": "sql",
        "version": 12,
        "digest": "sha256:ab",
        "tenant": "acme",
    }
    assert version_of(ServedBy((), (), "worker-0", "llama")) == {"name": "llama"}
    combined = ServedBy(("acme/sql:v12", "acme/tone:v1"), ("sha256:ab", "sha256:cd"), "w", "llama")
    assert version_of(combined) == {}
