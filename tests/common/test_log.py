"""Lines carry event and fields, as JSON or as text."""

import json
import logging

from loraplex_services.common.log import JsonFormatter, TextFormatter


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


def test_json_line_has_event_and_fields() -> None:
    line = json.loads(JsonFormatter("worker").format(_record()))
    assert line["event"] == "loaded it"
    assert (line["service"], line["level"], line["slot"]) == ("worker", "info", 3)
    assert line["time"].endswith("Z")


def test_text_line_has_event_and_fields() -> None:
    line = TextFormatter("worker").format(_record())
    assert line.endswith("I worker loaded it slot=3")


def test_traceback_is_kept_in_both_forms() -> None:
    record = _record()
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "boom" in json.loads(JsonFormatter("worker").format(record))["traceback"]
    assert "RuntimeError: boom" in TextFormatter("worker").format(record)
