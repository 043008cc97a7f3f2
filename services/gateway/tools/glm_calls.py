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

_PAIR = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"
_PAIRS = re.compile(_PAIR, re.DOTALL)
_NAME = re.compile(r"\s*([\w.-]{1,128})\s*")


def glm_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """Name and arguments of the text between the marks; None if it is no call.

    Args:
        schemas: JSON Schema of the arguments of each function offered.
    """
    name = _NAME.match(body)
    rest = body[name.end() :] if name else body
    if name is None or _PAIRS.sub("", rest):
        return None
    schema = schemas.get(name[1], {})
    arguments = ", ".join(
        f"{json.dumps(key.strip(), ensure_ascii=False)}: {json_value(value, key.strip(), schema)}"
        for key, value in _PAIRS.findall(rest)
    )
    return name[1], "{" + arguments + "}"
