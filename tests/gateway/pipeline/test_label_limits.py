"""Metrics by tenant and adapter stay few, whatever is requested."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from loraplex_services.gateway.pipeline.label_limits import IDLE_S, OTHER, LabelledCounters


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _counters(clock: Clock) -> tuple[CollectorRegistry, LabelledCounters]:
    registry = CollectorRegistry()
    requests = Counter("requests", "", ["tenant", "outcome"], registry=registry)
    tokens = Counter("tokens", "", ["tenant", "kind"], registry=registry)
    return registry, LabelledCounters(requests, tokens, most=2, now=clock)


def _requests(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["tenant"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "requests_total"
    }


def test_the_first_names_have_labels_and_all_others_share_one() -> None:
    registry, counters = _counters(Clock())
    for name in ("a", "b", "c", "d", "a"):
        counters.count(name, "ok", {"prompt": 2})
    assert _requests(registry) == {"a": 2, "b": 1, OTHER: 2}
    assert registry.get_sample_value("tokens_total", {"tenant": OTHER, "kind": "prompt"}) == 4


def test_an_idle_name_loses_its_label_to_one_in_use() -> None:
    clock = Clock()
    registry, counters = _counters(clock)
    counters.count("a", "ok", {})
    counters.count("a", "failed", {})
    clock.now_s = IDLE_S / 2
    counters.count("b", "ok", {})
    counters.count("c", "ok", {})
    clock.now_s = IDLE_S
    counters.count("c", "ok", {})
    counters.count("d", "ok", {})
    assert _requests(registry) == {"b": 1, "c": 1, OTHER: 2}
    clock.now_s = 3 * IDLE_S
    counters.count("a", "ok", {})
    assert _requests(registry)["a"] == 1, "a name that comes back begins anew"


def test_many_names_make_no_more_series_than_the_bound() -> None:
    clock = Clock()
    registry, counters = _counters(clock)
    for number in range(10_000):
        clock.now_s += IDLE_S
        counters.count(f"n{number}", "ok", {"prompt": 1})
    assert len(_requests(registry)) == 2
