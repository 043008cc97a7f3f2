"""Checks what goes over HTTP against the OpenAPI document that the gateway serves."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
from starlette.routing import Route

from loraplex_services.gateway.http import openapi

STREAM = "text/event-stream"
_TEMPLATES = {
    "/v1/models/": "/v1/models/{ref}",
    "/v1/files/": "/v1/files/{file_id}",
    "/v1/batches/": "/v1/batches/{batch_id}",
}
_ONE = re.compile(r"^(/v1/(?:models|files|batches)/)[^/]+")


@functools.cache
def _document() -> dict[str, Any]:
    """The document of the paths that have schemas."""
    gets = {"/v1/models", "/v1/models/{ref}", "/version"}
    calls = {*openapi._BODIES, *openapi._SAME, *openapi._FORMS, *openapi._ANSWERS}
    named = [call.split(" ") for call in calls if " " in call]
    others = [("GET" if path in gets else "POST", path) for path in calls if " " not in path]
    return openapi.document(
        [Route(path, _document, methods=[method]) for method, path in (*named, *others)]
    )


@functools.cache
def _validator(path: str, method: str, part: str) -> Any:
    """For `request`, or for responses of a media type; None if the document has no schema."""
    operation = _document()["paths"].get(path, {}).get(method)
    if operation is None:
        return None
    if part == "request":
        content, media = operation.get("requestBody", {}).get("content", {}), "application/json"
    elif part == "error":
        content, media = operation["responses"]["default"]["content"], "application/json"
    else:
        content, media = operation["responses"]["200"].get("content", {}), part
    if media not in content:
        return None
    schema = {**content[media]["schema"], "components": _document()["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check(path: str, method: str, part: str, value: Any) -> bool:
    """Whether there was a schema to check against. Raises: jsonschema.ValidationError."""
    validator = _validator(path, method.lower(), part)
    if validator is None:
        return False
    validator.validate(value)
    return True


async def check_exchange(response: Any, *, reads_streams: bool = False) -> int:
    """Check a request of an httpx client and its response; a hook of the official clients.

    Returns the number of objects that were checked.
    """
    request = response.request
    path, method = request.url.path, request.method
    path = _ONE.sub(lambda match: _TEMPLATES[match[1]], path)
    if response.status_code != 200:
        return 0
    num_checked = 0
    if request.headers.get("content-type") == "application/json" and request.content:
        num_checked += check(path, method, "request", json.loads(request.content))
    media = response.headers.get("content-type", "").partition(";")[0]
    if media == "application/json":
        num_checked += check(path, method, media, json.loads(await response.aread()))
    elif media == STREAM and reads_streams:
        for line in (await response.aread()).decode().splitlines():
            name, _, data = line.partition(": ")
            if name == "data" and data != "[DONE]":
                num_checked += check(path, method, STREAM, json.loads(data))
    return num_checked
