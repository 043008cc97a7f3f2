"""Logs as traces: a sample, rescaled, whose models are adapters by popularity."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidRequest
from loraplex.workload import LoggedRequest, read_log, sample_log

HEADER = "timestamp,model,input_length,output_length\n"
requests = st.builds(
    LoggedRequest,
    st.floats(-1e6, 1e9, allow_nan=False),
    st.sampled_from(["", "a", "b", "c"]),
    st.integers(1, 100),
    st.integers(1, 100),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text)
    return path


def test_columns_may_come_in_any_order_and_next_to_others(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "output_length,id,model,timestamp,input_length\r\n"
        '7,x,"vicuna, 13b",1690000000.5,3\r\n2,y,,1690000001,9\r\n',
    )
    assert read_log(path) == [
        LoggedRequest(1690000000.5, "vicuna, 13b", 3, 7),
        LoggedRequest(1690000001.0, "", 9, 2),
    ]


@given(log=st.lists(requests, min_size=1, max_size=60), data=st.data())
def test_a_sample_has_its_size_its_span_and_only_what_the_log_has(
    log: list[LoggedRequest], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(log)))
    trace, num_adapters = sample_log(log, count / 10.0, 10.0, seed=count)
    assert len(trace) == count and num_adapters == len({r.model for r in log} - {""})
    assert all(0.0 <= request.arrival_s <= 10.0 for request in trace)
    assert [r.arrival_s for r in trace] == sorted(r.arrival_s for r in trace)
    lengths = Counter((request.num_input, request.num_output) for request in trace)
    assert not lengths - Counter((request.num_input, request.num_output) for request in log)


@given(log=st.lists(requests, min_size=2, max_size=60))
def test_the_whole_log_keeps_its_order_its_popularity_and_relative_times(
    log: list[LoggedRequest],
) -> None:
    trace, num_adapters = sample_log(log, len(log) / 5.0, 5.0)
    counts = Counter(request.adapter for request in trace if request.adapter is not None)
    assert [counts[index] for index in range(num_adapters)] == sorted(
        Counter(request.model for request in log if request.model).values(), reverse=True
    )
    times = sorted(request.timestamp_s for request in log)
    if span_s := times[-1] - times[0]:
        expected = [(time - times[0]) / span_s * 5.0 for time in times]
        assert [request.arrival_s for request in trace] == pytest.approx(expected)


def test_a_sample_is_that_of_its_seed() -> None:
    log = [LoggedRequest(float(i), f"m{i % 3}", i + 1, 1) for i in range(100)]
    assert sample_log(log, 1, 50, seed=1) == sample_log(log, 1, 50, seed=1)
    assert sample_log(log, 1, 50, seed=1) != sample_log(log, 1, 50, seed=2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "lacks the columns timestamp, model"),
        ("timestamp,model\n1,a\n", "input_length, output_length"),
        (HEADER, "has no requests"),
        (HEADER + "1,a,3,4\nyesterday,a,3,4\n", "log.csv:3: timestamp"),
        (HEADER + "nan,a,3,4\n", "log.csv:2: timestamp"),
        (HEADER + "1,a,0,4\n", "log.csv:2: input_length"),
        (HEADER + "1,a,3,4.5\n", "log.csv:2: output_length"),
        (HEADER + "1,a,3\n", "log.csv:2: output_length"),
        (HEADER + "1,a,99999999,4\n", "log.csv:2: input_length"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_column(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        read_log(write(tmp_path, text))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read") as refused:
        read_log(tmp_path / "none.csv")
    assert refused.value.violations[0].value == str(tmp_path / "none.csv")
    (tmp_path / "log.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_log(tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("rate_per_s", "duration_s", "named"),
    [(3.0, 1.0, "needs 3 requests"), (0.0, 1.0, "--rate"), (1.0, float("inf"), "--duration")],
)
def test_more_than_the_log_has_and_impossible_numbers_are_refused(
    rate_per_s: float, duration_s: float, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        sample_log([LoggedRequest(0.0, "a", 1, 1)] * 2, rate_per_s, duration_s)
