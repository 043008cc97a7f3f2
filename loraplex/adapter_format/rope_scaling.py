"""A rotary embedding that belongs to an adapter: long-context LoRAs are trained with another one
than their base's, and PEFT's files do not say which.

Spelled as `rope_scaling` or `rope_parameters` of config.json are, with one key more:
`max_position_embeddings`, the adapter's context in tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.errors import InvalidAdapter

FIELD = "rope_scaling"
MAX_FACTOR = 1024.0
MAX_CONTEXT = 1 << 24
MAX_PAIRS = 1024
MAX_BYTES = 8 * 1024
MIN_THETA = 1.01
MIN_NUMBER = 1e-6
"""The smallest values whose frequencies and logarithms float32 can hold. Nobody trains with
less."""

Params = tuple[tuple[str, "float | bool | tuple[float, ...]"], ...]

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("long_factor", "short_factor"),
}
"""Required keys of each scaling method."""
_ORIGINAL = "original_max_position_embeddings"
OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": (_ORIGINAL,),
    "yarn": (
        _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": (_ORIGINAL, "attention_factor", "factor"),
}  # fmt: skip
_COMMON = frozenset({"rope_type", "type", "rope_theta", "max_position_embeddings"})
_INTEGERS = frozenset({_ORIGINAL, "max_position_embeddings"})
_RANGES = {"factor": (1.0, MAX_FACTOR), _ORIGINAL: (2, MAX_CONTEXT)}
_LISTS = frozenset({"long_factor", "short_factor"})
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A rotary embedding, checked as far as possible without the base."""

    kind: str
    """default, linear, llama3, yarn or longrope."""
    theta: float | None = None
    """Base frequency; None = the base's."""
    max_position_embeddings: int | None = None
    """The requested context in tokens; None = it follows from the rest."""
    params: Params = ()
    """The method's own numbers, sorted by name."""

    def context_tokens(self, base_tokens: int) -> int:
        """Prompt and output together, on a base whose own context is `base_tokens`, which is the
        least."""
        if self.max_position_embeddings is not None:
            return self.max_position_embeddings
        numbers = dict(self.params)
        factor = numbers.get("factor")
        if not isinstance(factor, float):
            return base_tokens
        original = numbers.get(_ORIGINAL, base_tokens)
        assert isinstance(original, int | float), "checked when it was read"
        return min(max(base_tokens, int(factor * original)), MAX_CONTEXT)

    def to_fields(self) -> dict[str, object]:
        """The JSON object that `read` parses; equal meanings give equal objects."""
        fields: dict[str, object] = {"rope_type": self.kind}
        if self.theta is not None:
            fields["rope_theta"] = _plain(self.theta)
        if self.max_position_embeddings is not None:
            fields["max_position_embeddings"] = self.max_position_embeddings
        for key, value in self.params:
            plain = [_plain(v) for v in value] if isinstance(value, tuple) else _plain(value)
            fields[key] = plain
        return dict(sorted(fields.items()))

    def to_json(self) -> str:
        """`to_fields` as text, for `parse`."""
        return json.dumps(self.to_fields(), separators=(",", ":"))


def parse(text: str) -> RopeScaling:
    """Read a label.

    Raises:
        InvalidAdapter: naming the key, with the way out.
    """
    example = 'such as {"rope_type": "linear", "factor": 4}'
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _refused("", f"{len(text)} characters", f"at most {MAX_BYTES} bytes")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _refused("", text, f"must be a JSON object as in config.json, {example}") from None
    return read(value)


def read(value: object) -> RopeScaling:
    """Read a JSON value.

    Raises:
        InvalidAdapter: naming the key, with the way out.
    """
    if not isinstance(value, dict):
        raise _refused("", value, "must be an object with rope_type, as in config.json")
    kind = value.get("rope_type", value.get("type"))
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "dynamic":
        description = (
            "is not served for adapters: it depends on the longest text a process has seen; "
            "train and publish with yarn or linear"
        )
        raise _refused(".rope_type", kind, description)
    if not isinstance(kind, str) or kind not in REQUIRED:
        raise _refused(".rope_type", kind, f"must be one of {', '.join(sorted(REQUIRED))}")
    return _read(kind, {key: item for key, item in value.items() if item is not None})


def _read(kind: str, value: Mapping[str, object]) -> RopeScaling:
    own = {*REQUIRED[kind], *OPTIONAL[kind]}
    for key in value:
        if key not in own | _COMMON:
            raise _refused(f".{key}", value[key], f"is not part of {kind}")
    for key in REQUIRED[kind]:
        if key not in value:
            raise _refused(f".{key}", None, f"is required by {kind}")
    theta = _number(value, "rope_theta", MIN_THETA, 1e12) if "rope_theta" in value else None
    context = _number(value, "max_position_embeddings", 1, MAX_CONTEXT)
    scaling = RopeScaling(
        kind,
        theta,
        None if context is None else int(context),
        tuple((key, _value(value, key)) for key in sorted(own & value.keys())),
    )
    if kind == "default" and theta is None:
        raise _refused(".rope_theta", None, "must be set: without it, this type changes nothing")
    if kind == "llama3":
        numbers = dict(scaling.params)
        if not float(str(numbers["high_freq_factor"])) > float(str(numbers["low_freq_factor"])):
            description = "must be above low_freq_factor"
            raise _refused(".high_freq_factor", numbers["high_freq_factor"], description)
    return scaling


def _value(value: Mapping[str, object], key: str) -> float | bool | tuple[float, ...]:
    if key == "truncate":
        if isinstance(value[key], bool):
            return bool(value[key])
        raise _refused(".truncate", value[key], "must be true or false")
    if key in _LISTS:
        return _factors(value[key], key)
    low, high = _RANGES.get(key, (MIN_NUMBER, MAX_CONTEXT))
    number = _number(value, key, low, high)
    assert number is not None, "the key is there"
    return number


def _factors(value: object, key: str) -> tuple[float, ...]:
    if isinstance(value, list) and 0 < len(value) <= MAX_PAIRS:
        numbers = [float(v) for v in value if type(v) in (int, float) and MIN_NUMBER <= v <= 1e6]
        if len(numbers) == len(value):
            return tuple(numbers)
    why = f"must be a list of numbers from {MIN_NUMBER:g} to 1e+06, one for each pair"
    raise _refused(f".{key}", "...", why)


def _number(value: Mapping[str, object], key: str, low: float, high: float) -> float | None:
    found = value.get(key)
    if found is None:
        return None
    is_integer = isinstance(found, int) and not isinstance(found, bool)
    if is_integer or (isinstance(found, float) and key not in _INTEGERS and math.isfinite(found)):
        assert isinstance(found, int | float)
        if low <= found <= high:
            return float(found)
    what = "integer" if key in _INTEGERS else "number"
    raise _refused(f".{key}", found, f"must be a {what} from {low:g} to {high:g}")


def _plain(number: float | bool) -> float | int | bool:
    """An integer for a whole float, so that 8.0 and 8 are the same factor."""
    is_integer = isinstance(number, float) and number.is_integer() and number < 2**53
    return int(number) if is_integer else number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _refused(path: str, value: object, description: str) -> InvalidAdapter:
    shown = value[:80] if isinstance(value, str) else value
    return InvalidAdapter.field(f"{FIELD}{path}", shown, description)
