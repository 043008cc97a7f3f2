"""Names of fields in a worker's errors, as clients know them.

A worker names fields of the WorkerRequest that the gateway made. Which ids and lengths an adapter
allows is known only there, so its refusals reach clients, who sent a prompt and flat options.
"""

from __future__ import annotations

import re
from dataclasses import replace

from loraplex.errors import InvalidRequest, LoraplexError

_PLACE = re.compile(r"\[\d+\]$")
_NAMES = {"prompt_ids": "prompt"}


def in_client_words(error: LoraplexError) -> LoraplexError:
    """The error with `prompt` for `prompt_ids[3]`, and so on. Mutates: error."""
    if not isinstance(error, InvalidRequest) or not error.violations:
        return error
    error.violations = tuple(replace(v, field=_client_field(v.field)) for v in error.violations)
    first = error.violations[0]
    error.message = f"{first.field}: {first.description}"
    error.args = (error.message,)
    return error


def _client_field(field: str) -> str:
    name = _PLACE.sub("", field.removeprefix("sampling."))
    return _NAMES.get(name, name)
