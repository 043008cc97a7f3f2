"""Mixed load for a long time, with one random fault each minute.

    python -m tests.faults.soak [--minutes 30] [--seed 0]

It fails if a promise of docs/operate/faults.md is broken, or if less than 99 % of the
requests and publications succeed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.faults.deployment import Deployment
from tests.faults.faults import FAULTS
from tests.faults.traffic import SERVED
from tests.faults.verdict import Verdict, try_fault
from tests.faults.write_table import row

MINUTE_S = 60.0
MIN_SUCCESS = 0.99


def run(minutes: int, seed: int) -> list[Verdict]:
    """One verdict for each minute, printed as a row of the table when it is over."""
    rng = random.Random(seed)
    verdicts = []
    with tempfile.TemporaryDirectory() as name, Deployment(Path(name)) as deployment:
        deployment.publish(SERVED)
        for minute in range(minutes):
            fault = rng.choice(FAULTS)
            verdict = try_fault(deployment, fault, Path(name) / f"minute-{minute}", MINUTE_S)
            verdicts.append(verdict)
            print(minute, row(fault, [verdict]), *verdict.violations, sep="\n    ", flush=True)
    return verdicts


def main() -> int:
    """Returns 1 if a promise was broken, or too much failed."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    verdicts = run(args.minutes, args.seed)
    num_tried = sum(each.num_asked + each.num_fresh + each.num_published for each in verdicts)
    num_failed = sum(each.num_refused for each in verdicts)
    num_violations = sum(len(each.violations) for each in verdicts)
    success = 1 - num_failed / num_tried
    print(f"{num_tried} tried, {success:.2%} succeeded, {num_violations} violations")
    return int(num_violations > 0 or success < MIN_SUCCESS)


if __name__ == "__main__":
    sys.exit(main())
