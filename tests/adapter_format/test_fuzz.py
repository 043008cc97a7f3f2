"""Whatever the bytes, the parsers answer or refuse: no other exception, and nothing absurd passes.

The bounded runs are part of every test run; `make test-long` feeds a million inputs. Inputs start
from well-formed files, so that mutations reach deep; seeds are fixed and failures are kept by
Hypothesis in `.hypothesis`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapter_format import parse_config, parse_header
from loraplex.adapter_format.config import canonical_config, canonical_json
from loraplex.errors import InvalidAdapter
from tests.adapter_format import builders
from tests.adapter_format.builders import Adapter, tiny_geometry

LONG_INPUTS = 1_000_000
SEED = 20261121

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_FIELDS = st.sampled_from([*builders.good_config(), "use_tomorrow", ""])


def check_config(raw: bytes) -> bool:
    """Whether the config is accepted; then its canonical form must mean the same."""
    try:
        config = parse_config(raw)
    except InvalidAdapter as error:
        assert error.violations
        assert all(v.field.startswith("adapter_config.json") for v in error.violations)
        return False
    again = parse_config(canonical_json(canonical_config(config)))
    assert canonical_config(again) == canonical_config(config)
    return True


def check_header(data: bytes) -> bool:
    """Whether the file is accepted; then its tensors must tile it."""
    try:
        header = parse_header(data, len(data))
    except InvalidAdapter as error:
        assert error.violations
        assert all(v.field.startswith("adapter_model.safetensors") for v in error.violations)
        return False
    position = header.header_bytes
    for info in header.tensors:
        assert info.begin == position and info.end >= info.begin
        position = info.end
    assert position == len(data)
    return True


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_FIELDS, _JSON, max_size=6))
def test_any_fields_are_accepted_or_refused(fields: dict[str, object]) -> None:
    check_config(json.dumps({**builders.good_config(), **fields}).encode())


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["x", "y", "__metadata__", ""]), _JSON, max_size=3))
def test_any_header_is_accepted_or_refused(header: dict[str, object]) -> None:
    check_header(builders.with_header(json.dumps(header).encode(), b"\x00" * 16))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_accepted_or_refused(raw: bytes) -> None:
    check_config(raw)
    check_header(raw)
    check_header(builders.with_header(raw, b""))


def mutations(original: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """`count` damaged copies: bytes changed, cut, doubled, moved, or replaced by telling ones."""
    telling = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-1", b"1e999", b"null", b"NaN", b"\\u"]
    telling += [b"9" * 25, b"\x00", b"\xff", b"true", b'"F32"', b'"r":', b"[0,8]", b"(.*)+"]
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(data) + 1)
            end = min(len(data), start + rng.choice([0, 1, 1, 2, 8]))
            choice = rng.random()
            if choice < 0.4:
                data[start:end] = rng.choice(telling)
            elif choice < 0.6:
                data[start:end] = rng.randbytes(end - start)
            elif choice < 0.8:
                del data[start:end]
            else:
                data[start:start] = data[start:end] * rng.randint(1, 3)
        yield bytes(data)


def fuzz(count: int, seed: int) -> int:
    """Feed mutations of a good config and a good file to both parsers; returns the accepted."""
    rng = random.Random(seed)
    file = builders.tensor_file(
        {"x": builders.Tensor("F32", (2,)), "y": builders.Tensor("F16", ())}
    )
    config = json.dumps(builders.good_config()).encode()
    accepted = sum(check_config(raw) for raw in mutations(config, rng, count // 2))
    return accepted + sum(check_header(raw) for raw in mutations(file, rng, count - count // 2))


def test_mutated_files_are_accepted_or_refused() -> None:
    assert 0 < fuzz(4000, SEED) < 4000


@pytest.mark.long
def test_a_million_mutated_files_are_accepted_or_refused() -> None:
    assert 0 < fuzz(LONG_INPUTS, SEED) < LONG_INPUTS


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whole_adapters_with_damage_validate_or_are_refused(rng: random.Random) -> None:
    adapter = Adapter()
    config = next(mutations(adapter.config, rng, 1)) if rng.random() < 0.5 else adapter.config
    length = int.from_bytes(adapter.tensors[:8], "little")
    header = next(mutations(adapter.tensors[8 : 8 + length], rng, 1))
    data = builders.with_header(header, adapter.tensors[8 + length :])
    try:
        report = Adapter(config, data).validate(tiny_geometry())
    except InvalidAdapter as error:
        assert error.violations
    else:
        assert 0 < report.num_modules <= 4 and 1 <= report.max_rank <= 256
