"""Simulated: how often a comparison of versions finds a regression of 5%, and how often it errs.

    python -m benchmarks run registry.shadow_test [--trials 2000]

Draws differences between a candidate and the served version, and gives them to the test of
`registry split --shadow`, which looks at the result after every pair. Differences are those of
log-probabilities (normal, with a standard deviation of 0.1 nats), or of answers that are right (1)
or wrong (0). The planted regression is 0.05, either way. Prints the share of trials in which it is
rejected within 500 pairs, the median number of pairs that this takes, and the share in which it is
accepted. Of an equally good candidate, it prints the share of false alarms: trials that reject it
within 2,000 pairs, which is when the command gives up. Seeded; no clock is read.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.machine import write_results
from loraplex.client.paired_test import Outcome, PairedTest

MARGIN = 0.01
REGRESSION = 0.05
MAX_PAIRS_TO_FIND, MAX_PAIRS = 500, 2000

Draw = Callable[[random.Random], float]


def lost(source: random.Random) -> float:
    """Of all answers, 5% were right and are wrong now."""
    return -1.0 if source.random() < REGRESSION else 0.0


def swapped(source: random.Random) -> float:
    """Of all answers, 5% changed between right and wrong, in either direction equally often."""
    return source.choice((-1.0, 1.0)) if source.random() < REGRESSION else 0.0


WORSE: dict[str, Draw] = {"logprobs": lambda s: s.gauss(-REGRESSION, 0.1), "right_or_wrong": lost}
EQUAL: dict[str, Draw] = {"logprobs": lambda s: s.gauss(0.0, 0.1), "right_or_wrong": swapped}


@dataclass(slots=True)
class Trials:
    """How the trials of one kind of candidate ended."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    rejected_after: list[int] = field(default_factory=list)
    """Numbers of pairs."""


def run(draw: Draw, num_trials: int, max_pairs: int) -> Trials:
    """Draw differences until the test decides, or `max_pairs` times, in each trial."""
    trials = Trials()
    for seed in range(num_trials):
        source, test = random.Random(seed), PairedTest(MARGIN)
        outcome = Outcome.UNDECIDED
        while test.num_pairs < max_pairs and outcome is Outcome.UNDECIDED:
            test.add(draw(source))
            outcome = test.outcome
        trials.outcomes[outcome] += 1
        if outcome is Outcome.REJECTED:
            trials.rejected_after.append(test.num_pairs)
    return trials


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=2000)
    args = parser.parse_args()
    result: dict[str, object] = {"options": vars(args)}
    for kind, draw in WORSE.items():
        trials = run(draw, args.trials, MAX_PAIRS_TO_FIND)
        result[f"regression_{kind}"] = {
            "found": trials.outcomes[Outcome.REJECTED] / args.trials,
            "median_pairs": statistics.median(trials.rejected_after or [MAX_PAIRS_TO_FIND]),
            "accepted": trials.outcomes[Outcome.ACCEPTED] / args.trials,
        }
    for kind, draw in EQUAL.items():
        trials = run(draw, args.trials, MAX_PAIRS)
        result[f"equal_{kind}"] = {
            "false_alarms": trials.outcomes[Outcome.REJECTED] / args.trials,
            "accepted": trials.outcomes[Outcome.ACCEPTED] / args.trials,
        }
    print(json.dumps(result, indent=1))
    write_results("shadow_test", result)


if __name__ == "__main__":
    main()
