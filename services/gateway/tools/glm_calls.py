"""Reads calls that a model writes as pairs of tags, as GLM-4.5 and later do.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from loraplex_services.gateway.tools.schema_values import json_value

_PAIR = re.compile(
    r"<arg_key>((?:(?!</arg_key>).)*+)</arg_key>\s*+<arg_value>((?:(?!</arg_value>).)*+)</arg_value>\s*+",
    re.DOTALL,
)
"""Never gives back what it has matched, so that a text without an end is read once."""
_NAME = re.compile(r"\s*([\w.-]{1,128})\s*")


def glm_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """Name and arguments of the text between the marks; None if it is no call.

    Args:
        schemas: JSON Schema of the arguments of each function offered.
    """
    name = _NAME.match(body)
    if name is None:
        return None
    schema, members, at = schemas.get(name[1], {}), list[str](), name.end()
    while at < len(body):
        pair = _PAIR.match(body, at)
        if pair is None:
            return None
        key, value = pair[1].strip(), pair[2]
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {json_value(value, key, schema)}")
        at = pair.end()
    return name[1], "{" + ", ".join(members) + "}"
