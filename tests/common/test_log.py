"""Lines carry event and fields, as JSON or as text."""

import ast
import json
import logging
from pathlib import Path

from loraplex_services.common.telemetry.log import JsonFormatter, TextFormatter


def _record() -> logging.LogRecord:
    return logging.getLogger("loraplex_services.x").makeRecord(
        "loraplex_services.x",
        logging.INFO,
        __file__,
        1,
        "loaded %s",
        ("it",),
        None,
        extra={"slot": 3},
    )


ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("loraplex", "services") for path in (ROOT / top).rglob("*.py"))
RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def _fields(path: Path) -> set[str]:
    """The fields that a module's log lines name."""
    nodes = ast.walk(ast.parse(path.read_text()))
    given = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "extra"]
    keys = [key for extra in given if isinstance(extra, ast.Dict) for key in extra.keys]
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def test_no_line_has_a_field_that_logging_refuses() -> None:
    """`extra={"name": ...}` raises a KeyError in the place of logging."""
    refused = {str(path): RESERVED & _fields(path) for path in SOURCES}
    assert {path: fields for path, fields in refused.items() if fields} == {}


def test_json_line_has_event_and_fields() -> None:
    line = json.loads(JsonFormatter("worker").format(_record()))
    assert line["event"] == "loaded it"
    assert (line["service"], line["level"], line["slot"]) == ("worker", "info", 3)
    assert line["time"].endswith("Z")


def test_text_line_has_event_and_fields() -> None:
    line = TextFormatter("worker").format(_record())
    assert line.endswith("I worker loaded it slot=3")


def test_what_others_wrote_forges_no_line_of_text() -> None:
    forged = "a\n12:00:00 I worker drained\x1b[2J\u2028"
    record = _record()
    record.msg, record.args = f"refused {forged}", None
    record.reason = forged
    try:
        raise RuntimeError(forged)
    except RuntimeError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    first, *trace = TextFormatter("worker").format(record).splitlines()
    escaped = r"a\n12:00:00 I worker drained\x1b[2J\u2028"
    assert first.endswith(rf"I worker refused {escaped} slot=3 reason={escaped}")
    assert trace and all(line.startswith("  ") for line in trace)


def test_traceback_is_kept_in_both_forms() -> None:
    record = _record()
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "boom" in json.loads(JsonFormatter("worker").format(record))["traceback"]
    assert "RuntimeError: boom" in TextFormatter("worker").format(record)
