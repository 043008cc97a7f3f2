"""Reads logs of real requests as traces, as section 7.3 of the S-LoRA paper does for Chatbot Arena.

A log is a CSV file with a header and the columns `timestamp`, `model`, `input_length` and
`output_length`, in any order and next to others. Rows may be in any order as well.
"""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex.workload.trace import TracedRequest

COLUMNS = ("timestamp", "model", "input_length", "output_length")
MAX_LENGTH = 1 << 20
"""Most tokens of a length; longer than any context."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One row of a log."""

    timestamp_s: float
    """Seconds since any moment."""
    model: str
    """Empty = the bare base."""
    num_input: int
    num_output: int


def read_log(path: Path) -> list[LoggedRequest]:
    """All rows, in the order of the file.

    Raises:
        InvalidRequest: it cannot be read, or a row is wrong; names the line and the column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_rows(path, csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest.field("--trace", path, f"cannot be read as CSV: {error}") from None
    if not rows:
        raise InvalidRequest.field("--trace", path, "has no requests")
    return rows


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[LoggedRequest]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        why = f"lacks the columns {', '.join(missing)}: the first line names the columns"
        raise InvalidRequest.field("--trace", path, why)
    for row in reader:
        where = f"{path}:{reader.line_num}"
        yield LoggedRequest(
            _timestamp(where, row["timestamp"]),
            (row["model"] or "").strip(),
            _length(where, "input_length", row["input_length"]),
            _length(where, "output_length", row["output_length"]),
        )


def _timestamp(where: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequest.field(f"{where}: timestamp", text, "must be a number of seconds")
    return value


def _length(where: str, name: str, text: str | None) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_LENGTH:
        why = f"must be a number of tokens from 1 to {MAX_LENGTH}"
        raise InvalidRequest.field(f"{where}: {name}", text, why)
    return value


def sample_log(
    log: Sequence[LoggedRequest], rate_per_s: float, duration_s: float, seed: int = 0
) -> tuple[list[TracedRequest], int]:
    """A trace of `rate_per_s * duration_s` requests drawn from a log, and how many adapters the
    log's models make.

    No request is drawn twice. The log's times, from its first to its last request, become those
    from 0 to `duration_s`. The most popular model of the log is adapter 0, and so on.

    Raises:
        InvalidRequest: a number is not above 0, or the log has fewer requests.
    """
    for name, value in (("--rate", rate_per_s), ("--duration", duration_s)):
        if not (math.isfinite(value) and value > 0):
            raise InvalidRequest.field(name, value, "must be a finite number above 0")
    count = max(1, round(rate_per_s * duration_s))
    if count > len(log):
        why = (
            f"needs {count} requests for {duration_s:g} s, but the log has {len(log)}; lower the "
            "rate or the duration"
        )
        raise InvalidRequest.field("--rate", rate_per_s, why)
    popularity = Counter(request.model for request in log if request.model)
    by_popularity = sorted(popularity, key=lambda model: (-popularity[model], model))
    adapters = {model: index for index, model in enumerate(by_popularity)}
    times = [request.timestamp_s for request in log]
    begin_s, span_s = min(times), (max(times) - min(times)) or 1.0
    drawn = random.Random(f"{seed}/log").sample(log, count)
    trace = [
        TracedRequest(
            (request.timestamp_s - begin_s) / span_s * duration_s,
            adapters.get(request.model),
            request.num_input,
            request.num_output,
        )
        for request in drawn
    ]
    trace.sort(key=lambda request: request.arrival_s)
    return trace, len(adapters)
