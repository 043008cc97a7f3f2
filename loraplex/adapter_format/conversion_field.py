"""The field `conversion` of adapter_config.json, which records what a rewritten adapter has lost.

The commands that rewrite adapters set it. It does not change what is decoded, but its warnings are
stored on the version.
"""

from __future__ import annotations

from loraplex.adapter_format.config_reader import AdapterConfigReader

FIELD = "conversion"
MAX_EXACT_ERROR = 1e-5
"""Relative error below which a conversion counts as exact."""
MAX_DROPPED = 100_000
_KEYS = frozenset({"dropped", "method", "relative_error"})


def conversion(method: str, *, relative_error: float = 0.0, dropped: int = 0) -> dict[str, object]:
    """The field's value.

    Args:
        method: what the adapter was before, such as `LOHA`.
        relative_error: of a module's weights, the largest: |converted - original| / |original|.
        dropped: modules that were left out.
    """
    return {FIELD: {"dropped": dropped, "method": method, "relative_error": relative_error}}


def check_conversion(reader: AdapterConfigReader) -> None:
    """Warn about what was lost, and refuse what no command writes."""
    value = reader.fields.get(FIELD)
    if value is None:
        return
    problem = _problem(value)
    if problem is not None or not isinstance(value, dict):
        reader.refuse(FIELD, value, problem or "")
        return
    method, error, dropped = value["method"], value["relative_error"], value["dropped"]
    if error > MAX_EXACT_ERROR:
        why = f"is the largest relative error of a module's weights after conversion from {method}"
        reader.warn(f"{FIELD}.relative_error", f"{error:.1e}", why)
    if dropped:
        why = "modules of vision or audio towers were left out, which only matter for images"
        reader.warn(f"{FIELD}.dropped", dropped, why)


def _problem(value: object) -> str | None:
    if not isinstance(value, dict) or set(value) != _KEYS:
        return f"must be an object of {', '.join(sorted(_KEYS))}; leave it to `registry convert`"
    method, error, dropped = value["method"], value["relative_error"], value["dropped"]
    if not isinstance(method, str) or not 0 < len(method) <= 64:
        return "must have a method of 1 to 64 characters"
    if type(error) not in (int, float) or not 0 <= error < float("inf"):
        return "must have a relative_error of at least 0"
    if type(dropped) is not int or not 0 <= dropped <= MAX_DROPPED:
        return f"must have a number of dropped modules from 0 to {MAX_DROPPED}"
    return None
