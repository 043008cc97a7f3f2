"""Virtual token counters: who was away earns no credit, and who left is forgotten in time."""

from __future__ import annotations

from loraplex_services.common.virtual_counters import (
    EXPECTED_BACK_S,
    MAX_ABSENT,
    VirtualCounters,
    service,
)


def test_output_costs_twice_as_much_as_input_and_a_weight_divides_both() -> None:
    assert service(10, 5, 1.0) == 20.0
    assert service(10, 5, 2.0) == 10.0


def test_who_was_away_earns_no_credit() -> None:
    counters = VirtualCounters()
    counters.charge(counters.arrive("busy"), 1000.0)
    assert counters.served_of("late") == 1000.0
    assert counters.arrive("late").served == 1000.0


def test_who_leaves_for_a_moment_keeps_its_account() -> None:
    counters = VirtualCounters()
    greedy, polite = (counters.arrive(name) for name in ("greedy", "polite"))
    counters.charge(greedy, 1000.0)
    counters.leave("greedy")
    assert counters.arrive("greedy").served > polite.served


def test_the_counters_of_the_absent_do_not_pile_up() -> None:
    counters = VirtualCounters()
    for index in range(5000):
        counters.charge(counters.arrive(f"{index}"), 1.0)
        counters.leave(f"{index}")
    assert len(counters.accounts) <= MAX_ABSENT + 1
    assert len(counters.left_s) <= MAX_ABSENT


def test_who_left_a_moment_ago_still_counts_as_served_less() -> None:
    counters = VirtualCounters()
    busy, _ = (counters.arrive(name) for name in ("busy", "gone"))
    counters.charge(busy, 10.0)
    assert counters.is_least_served("gone", 0.0) and not counters.is_least_served("busy", 0.0)
    counters.leave("gone", 5.0)
    assert not counters.is_least_served("busy", 5.0 + EXPECTED_BACK_S)
    assert counters.is_least_served("busy", 5.1 + EXPECTED_BACK_S)
