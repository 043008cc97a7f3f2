"""Configures logging of a process: JSON lines in pods, short text on a terminal.

Messages name an event, fields go into `extra`: `logger.info("loaded", extra={"digest": digest})`.
Never log prompts, completions or token ids.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from loraplex.printable import printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(service: str, level: str = "info", style: str = "auto") -> None:
    """Send every record to stderr.

    Args:
        service: short name that each line carries, such as "gateway".
        level: "debug", "info", "warning" or "error".
        style: "json", "text", or "auto" (text on a terminal, JSON elsewhere).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(service, style, sys.stderr))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("uvicorn.access", "botocore", "boto3", "urllib3", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The `extra` fields of a record."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, service, logger, event, then the fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:03:04 I gateway event key=value`. The lines of a traceback are indented, so that an
    error whose text has line breaks cannot forge an event."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [clock, record.levelname[0], self._service, record.getMessage()]
        parts += [f"{key}={value}" for key, value in fields_of(record).items()]
        lines = [" ".join(parts)]
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            lines += [f"  {line}" for line in trace]
        return "\n".join(map(printable, lines))


def _formatter(service: str, style: str, stream: TextIO) -> logging.Formatter:
    if style == "text" or (style == "auto" and stream.isatty()):
        return TextFormatter(service)
    return JsonFormatter(service)
