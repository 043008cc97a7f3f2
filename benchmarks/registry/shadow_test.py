"""Simulated: how often a comparison of versions finds a regression of 5%, and how often it errs.

    python -m benchmarks run registry.shadow_test [--trials 2000]

Draws differences between a candidate and the served version, and gives them to the test of
`registry split --shadow`, which looks at the result after every pair. Differences are those of
log-probabilities (normal, with a standard deviation of 0.1 nats), or of answers that are right (1)
or wrong (0). The planted regression is 0.05 on average, either way. Where answers are right or
wrong, others may differ as well: `10% lost, 5% won` says that 10% were right and are wrong now, and
5% the other way. Prints the share of trials in which the regression is rejected within 500 pairs
and within 2,000, which is when the command gives up, the median number of pairs that this takes,
and the share in which it is accepted. Of an equally good candidate, it prints the share of false
alarms (trials that reject it) and of those that accept it within 2,000 pairs. Seeded; no clock is
read.

For right and wrong, it also computes a bound: no test that looks once, after exactly 500 pairs, and
that rejects a candidate at the margin in at most 1% of the cases, finds the regression more often.
It is the power of the likelihood-ratio test (Neyman and Pearson) against a single candidate at the
margin, the one that is hardest to tell apart.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.machine import options_of, write_results
from loraplex.client.paired_test import LEVEL, Outcome, PairedTest

MARGIN = 0.01
REGRESSION = 0.05
MAX_PAIRS_TO_FIND, MAX_PAIRS = 500, 2000
WON = (0.0, 0.01, 0.025, 0.05)
"""Shares of answers that were wrong and are right now."""
NEGLIGIBLE = 1e-9
"""Probability below which a cell of a table does not count."""

Draw = Callable[[random.Random], float]


def logprobs(mean: float) -> Draw:
    """Differences of log-probabilities."""
    return lambda source: source.gauss(mean, 0.1)


def changed(lost: float, won: float) -> Draw:
    """Differences of answers, of which shares changed from right to wrong and the other way."""

    def draw(source: random.Random) -> float:
        value = source.random()
        return -1.0 if value < lost else float(value < lost + won)

    return draw


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


def probability(num_lost: int, num_won: int, lost: float, won: float) -> float:
    """Probability of these numbers of lost and won answers among 500 pairs."""
    num_same = MAX_PAIRS_TO_FIND - num_lost - num_won
    log = math.lgamma(MAX_PAIRS_TO_FIND + 1) + num_same * math.log(1 - lost - won)
    for number, share in ((num_lost, lost), (num_won, won)):
        if number:
            log += number * math.log(share) if share else -math.inf
        log -= math.lgamma(number + 1)
    return math.exp(log - math.lgamma(num_same + 1))


def bound(lost: float, won: float) -> float:
    """The highest share of regressions that a test after 500 pairs can find; see above."""
    largest = MAX_PAIRS_TO_FIND // 3
    cells = {
        (num_lost, num_won): found
        for num_lost in range(largest)
        for num_won in range(largest if won else 1)
        if (found := probability(num_lost, num_won, lost, won)) > NEGLIGIBLE
    }
    steps = [won + step * REGRESSION / 40 for step in range(1, 21)]
    return min(power(cells, other + MARGIN, other) for other in steps)


def power(cells: dict[tuple[int, int], float], lost: float, won: float) -> float:
    """Of the best test for `cells` against these shares."""
    others = {cell: probability(*cell, lost, won) for cell in cells}
    found, error = 1 - sum(cells.values()), 0.0
    for cell in sorted(cells, key=lambda cell: others[cell] / cells[cell]):
        share = min(1.0, (LEVEL - error) / others[cell]) if others[cell] else 1.0
        found += share * cells[cell]
        error += share * others[cell]
        if share < 1:
            break
    return found


def regression(draw: Draw, num_trials: int) -> dict[str, float]:
    """How the test treats a candidate that is worse."""
    trials = run(draw, num_trials, MAX_PAIRS)
    in_time = [pairs for pairs in trials.rejected_after if pairs <= MAX_PAIRS_TO_FIND]
    return {
        "found_within_500": len(in_time) / num_trials,
        "found_within_2000": trials.outcomes[Outcome.REJECTED] / num_trials,
        "median_pairs": statistics.median(trials.rejected_after or [MAX_PAIRS]),
        "accepted": trials.outcomes[Outcome.ACCEPTED] / num_trials,
    }


def equal(draw: Draw, num_trials: int) -> dict[str, float]:
    """How the test treats a candidate that is as good as the served version."""
    trials = run(draw, num_trials, MAX_PAIRS)
    return {
        "false_alarms": trials.outcomes[Outcome.REJECTED] / num_trials,
        "accepted": trials.outcomes[Outcome.ACCEPTED] / num_trials,
    }


def main() -> None:
    """Simulate, print, write."""
    parser = options_of(__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    args = parser.parse_args()
    result: dict[str, object] = {"simulated": True}
    result["regression of log-probabilities"] = regression(logprobs(-REGRESSION), args.trials)
    result["equal log-probabilities"] = equal(logprobs(0.0), args.trials)
    for won in WON:
        lost = won + REGRESSION
        result[f"{lost:.1%} lost, {won:.1%} won"] = {
            **regression(changed(lost, won), args.trials),
            "bound_within_500": bound(lost, won),
        }
    for share in (0.0, 0.025, 0.05):
        draw = changed(share, share)
        result[f"{share:.1%} lost, {share:.1%} won"] = equal(draw, args.trials)
    print(json.dumps(result, indent=1))
    write_results("shadow_test", result, args)


if __name__ == "__main__":
    main()
