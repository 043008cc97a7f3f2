"""Try faults and write their rows of the table of `docs/operate/faults.md`.

    python -m tests.faults.write_table [--rounds 3] [--only TEXT]

A round takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.deployment import Deployment
from tests.faults.faults import ALWAYS, FAULTS, REFUSED_TOO, Fault
from tests.faults.traffic import SERVED, Outcome
from tests.faults.verdict import Verdict, try_fault

PAGE = Path(__file__).parents[2] / "docs/operate/faults.md"
BEGIN, END = "<!-- table: written by tests/faults/write_table.py -->", "<!-- end of the table -->"
_HEAD = (
    "| fault | requests for adapters in use | tries: requests, first requests, publications "
    "| refused | slowest (s) | violations |\n|---|---|---|---|---|---|"
)


def promise_of(allowed: frozenset[Outcome]) -> str:
    """What is promised for requests, in words."""
    if allowed == ALWAYS:
        return "right answers"
    if allowed == REFUSED_TOO:
        return "right answers, or an error with a reason"
    if Outcome.DROPPED in allowed:
        return "right answers, or a connection that ends"
    return "right answers, or an error with a reason, also in the middle of a stream"


def row(fault: Fault, verdicts: Sequence[Verdict]) -> str:
    """One line of the table: sums over the rounds, and the slowest request of all."""
    tries = (
        sum(verdict.num_asked for verdict in verdicts),
        sum(verdict.num_fresh for verdict in verdicts),
        sum(verdict.num_published for verdict in verdicts),
    )
    cells = (
        fault.name,
        promise_of(fault.asked),
        ", ".join(map(str, tries)),
        str(sum(verdict.num_refused for verdict in verdicts)),
        f"{max(verdict.slowest_s for verdict in verdicts):.1f}",
        str(sum(len(verdict.violations) for verdict in verdicts)),
    )
    return f"| {' | '.join(cells)} |"


def write(page: Path, tried: Mapping[str, str]) -> None:
    """Put rows into the table of the page, by fault; faults that were not tried keep theirs."""
    before, rest = page.read_text().split(BEGIN)
    table, after = rest.split(END)
    known = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    rows = [{**known, **tried}.get(fault.name) for fault in FAULTS]
    page.write_text("\n".join([f"{before}{BEGIN}", _HEAD, *filter(None, rows), f"{END}{after}"]))


def main() -> int:
    """Returns 1 if a promise was broken."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.only in fault.name]
    verdicts: dict[str, list[Verdict]] = {fault.name: [] for fault in faults}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Deployment(folder) as deployment:
            deployment.publish(SERVED)
            for number in range(args.rounds):
                for place, fault in enumerate(faults):
                    verdict = try_fault(deployment, fault, folder / f"round-{number}-{place}")
                    verdicts[fault.name].append(verdict)
                    print(row(fault, [verdict]), flush=True)
                    for violation in verdict.violations:
                        print(f"    {violation[:300]}", file=sys.stderr, flush=True)
    write(PAGE, {fault.name: row(fault, verdicts[fault.name]) for fault in faults})
    return int(any(verdict.violations for tried in verdicts.values() for verdict in tried))


if __name__ == "__main__":
    sys.exit(main())
