"""The results of the tests that ran on a GPU, from the files that pytest wrote.

    python -m benchmarks.gpu.verdict [--device cpu] [--out DIR] JUNIT.xml...

For each test file: how many tests passed, failed and were skipped. `device_error` counts tests that
failed with an error of the device apart, because without pytest-xdist, all further tests of the
process then fail as well, whatever they test. Failures are listed with the first line of their
message, and skipped tests with their reason.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu.common import RESULTS, print_table, write_results

OUTCOMES = ("passed", "failed", "device_error", "skipped")


def main() -> int:
    """Read, print, write; returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts = summary(cases_of(*args.files))
    print_table(facts["files"])
    print(write_results("tests", torch.device(args.device), facts, args.out))
    return int(facts["failed"] + facts["device_error"])


def cases_of(*files: Path) -> list[ElementTree.Element]:
    """The tests in files of pytest's, each as the last file has it. A process that ends in a test
    reports it once more; what it reports first counts."""
    found: dict[tuple[str | None, str | None], ElementTree.Element] = {}
    for file in files:
        own: dict[tuple[str | None, str | None], ElementTree.Element] = {}
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            if case.get("classname"):  # others were interrupted
                own.setdefault((case.get("classname"), case.get("name")), case)
        found |= own
    return list(found.values())


def summary(cases: list[ElementTree.Element]) -> dict[str, Any]:
    """Counts of each test file, failures, and reasons of skipped tests with their number."""
    counts: dict[str, Counter[str]] = {}
    failures, reasons = [], Counter[str]()
    for case in cases:
        file = case.get("classname", "").replace(".", "/") + ".py"
        outcome, message = outcome_of(case)
        counts.setdefault(file, Counter())[outcome] += 1
        if outcome in ("failed", "device_error"):
            failures.append({"file": file, "test": case.get("name"), "message": message})
        elif outcome == "skipped":
            reasons[message] += 1
    rows = [{"file": file, **{o: counts[file][o] for o in OUTCOMES}} for file in sorted(counts)]
    totals = {outcome: sum(row[outcome] for row in rows) for outcome in OUTCOMES}
    return {**totals, "failures": failures, "reasons": dict(reasons), "files": rows}


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    """One of OUTCOMES, and the first line of the message."""
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            message, text = found.get("message", ""), found.text or ""
            if outcome == "failed" and "CUDA error" in message + text:
                outcome = "device_error"
            return outcome, message.partition("\n")[0][:300]
    return "passed", ""


if __name__ == "__main__":
    raise SystemExit(main())
