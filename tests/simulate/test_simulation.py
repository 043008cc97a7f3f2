"""The simulator: times that can be reckoned by hand, and the engine's own behaviour."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from loraplex.api.residency import Tier
from loraplex.workload import (
    RANK_MIXES,
    TracedRequest,
    UniformLengths,
    Workload,
    generate,
    ranks_of,
    summarize,
)
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.routing.router import are_fetched
from loraplex_services.simulate.simulation import Simulation
from loraplex_services.simulate.worker import SimulatedWorker
from tests.simulate.fleets import COSTS, engine_config, fleet

SHORT = UniformLengths((8, 64), (4, 32))


def test_one_request_of_the_base_takes_the_sum_of_its_steps() -> None:
    (outcome,) = Simulation(fleet(), []).run([TracedRequest(1.0, None, 20, 4)])
    assert outcome.first_token_s == pytest.approx(1.0 + 0.010 + 20 * 0.001)
    assert outcome.end_s == pytest.approx(1.0 + 4 * 0.010 + (20 + 3) * 0.001)
    assert outcome.finished and outcome.num_output == 4


def test_a_step_after_idling_takes_longer_and_the_next_one_does_not() -> None:
    costs = replace(COSTS, idle_s=0.5)
    (outcome,) = Simulation(fleet(costs=costs), []).run([TracedRequest(1.0, None, 20, 2)])
    assert outcome.first_token_s == pytest.approx(1.0 + 0.5 + 0.030)
    assert outcome.end_s == pytest.approx(1.0 + 0.5 + 0.030 + 0.011)


def test_a_worker_with_drafts_takes_fewer_steps_for_outputs_that_repeat() -> None:
    trace = [TracedRequest(0.0, None, 20, 40)]
    num_steps = []
    for repeat_begin in (0.0, 1.0):
        simulation = Simulation(fleet(costs=replace(COSTS, repeat_begin=repeat_begin)), [])
        (outcome,) = simulation.run(trace)
        assert outcome.finished and outcome.num_output == 40
        num_steps.append(simulation.tally.steps)
    assert num_steps[0] == 40
    assert num_steps[1] < 20


def test_outputs_of_one_adapter_repeat_each_other_so_that_drafts_are_found_sooner() -> None:
    costs = replace(COSTS, repeat_begin=1.0)
    num_steps = []
    for second_adapter in (0, 1):
        trace = [TracedRequest(0.0, 0, 20, 20), TracedRequest(5.0, second_adapter, 20, 20)]
        simulation = Simulation(fleet(costs=costs), [8, 8])
        assert all(outcome.num_output == 20 for outcome in simulation.run(trace))
        num_steps.append(simulation.tally.steps)
    assert num_steps[0] < num_steps[1] - 2


def test_time_outside_the_worker_is_added_and_passes_before_a_slot_is_free_again() -> None:
    costs = replace(COSTS, request_s=0.1, request_p90_s=0.1)
    alone = fleet(costs=costs, admission=AdmissionLimits(max_running=1))
    first, second = Simulation(alone, []).run([TracedRequest(0.0, None, 20, 1)] * 2)
    assert first.end_s == pytest.approx(0.1 + 0.030)
    assert first.end_s < second.end_s < 2 * first.end_s


def test_a_request_spends_less_time_outside_the_worker_while_another_is_in_flight() -> None:
    costs = replace(COSTS, request_s=0.1, request_p90_s=0.1, awake_share=0.5)
    trace = [TracedRequest(moment_s, None, 20, 1) for moment_s in (0.0, 0.05, 1.0)]
    first, second, third = Simulation(fleet(costs=costs), []).run(trace)
    assert first.first_token_latency_s == pytest.approx(0.1 + 0.030)
    assert second.first_token_latency_s < 0.1
    assert third.first_token_latency_s == pytest.approx(0.1 + 0.030)


def test_steps_that_overlap_are_launched_before_the_last_one_ends() -> None:
    """A request that comes during a step joins the step after the next one, or the next one if
    steps follow each other."""
    trace = [TracedRequest(0.0, None, 20, 8), TracedRequest(0.035, None, 20, 1)]
    for overlaps, first_token_s in ((False, 0.041 + 0.031), (True, 0.052 + 0.031)):
        first, second = Simulation(fleet(overlaps=overlaps), []).run(trace)
        assert first.end_s == pytest.approx(8 * 0.010 + (20 + 7 + 20) * 0.001)
        assert second.first_token_s == pytest.approx(first_token_s)


def test_a_copy_that_is_shorter_than_half_a_step_delays_no_request_if_steps_overlap() -> None:
    trace = [TracedRequest(0.0, None, 20, 8), TracedRequest(0.035, 0, 20, 1)]
    waits_s = {}
    for overlaps in (False, True):
        for adapter in (None, 0):
            requests = [trace[0], replace(trace[1], adapter=adapter)]
            costs = replace(COSTS, load_s=0.004)
            simulated = fleet(costs=costs, on_disk=True, overlaps=overlaps)
            _, second = Simulation(simulated, [8]).run(requests)
            waits_s[overlaps, adapter] = second.first_token_latency_s
    assert waits_s[True, 0] == pytest.approx(waits_s[True, None])
    assert waits_s[False, 0] > waits_s[False, None] + 0.003


def test_the_gateway_keeps_requests_back_and_refuses_those_beyond_its_queue() -> None:
    trace = [TracedRequest(0.0, None, 20, 2)] * 3
    narrow = fleet(admission=AdmissionLimits(max_running=1, max_waiting=1))
    first, second, third = Simulation(narrow, []).run(trace)
    assert first.end_s == pytest.approx(0.041)
    assert second.first_token_latency_s == pytest.approx(0.041 + 0.030)
    assert (third.finished, third.reason) == (False, "QUEUE_FULL")


def test_a_polite_tenant_waits_less_than_a_flood_before_it() -> None:
    flood = [TracedRequest(0.0, None, 20, 20, tenant="greedy")] * 20
    waits_s = {}
    for tenant in ("greedy", "polite"):
        trace = [*flood, TracedRequest(0.01, None, 20, 20, tenant=tenant)]
        config = engine_config(max_num_seqs=2)
        *_, last = Simulation(fleet(engine=config), []).run(trace)
        waits_s[tenant] = last.first_token_latency_s
    assert waits_s["polite"] < waits_s["greedy"] / 3


def test_a_first_use_waits_for_fetch_and_copy_and_a_second_for_neither() -> None:
    trace = [TracedRequest(0.0, 0, 10, 1), TracedRequest(5.0, 0, 10, 1)]
    simulation = Simulation(fleet(), [8])
    first, second = simulation.run(trace)
    assert second.first_token_latency_s == pytest.approx(0.020)
    assert first.first_token_latency_s == pytest.approx(0.020 + 0.100 + 0.005)
    assert simulation.tally.loads == 1


def test_on_disk_adapters_are_not_fetched() -> None:
    (outcome,) = Simulation(fleet(on_disk=True), [8]).run([TracedRequest(0.0, 0, 10, 1)])
    assert outcome.first_token_latency_s == pytest.approx(0.020 + 0.005)


def test_a_request_past_its_deadline_is_counted_as_aborted() -> None:
    trace = [TracedRequest(0.0, None, 10, 500)]
    (outcome,) = Simulation(fleet(deadline_s=1.0), []).run(trace)
    assert not outcome.finished
    assert outcome.reason == "DEADLINE_EXCEEDED"
    assert summarize([outcome]).attainment == 0.0


def test_equal_arguments_give_equal_outcomes() -> None:
    workload = Workload(50, rate_per_s=20, duration_s=5, lengths=SHORT)
    ranks = ranks_of(RANK_MIXES["S2"], 50)
    runs = [Simulation(fleet(), ranks).run(generate(workload)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(outcome.finished for outcome in runs[0])


def test_a_tight_arena_evicts_and_reloads_adapters() -> None:
    config = engine_config(arena_bytes=64 * COSTS.block_bytes)
    workload = Workload(60, rate_per_s=20, duration_s=5, lengths=SHORT)
    simulation = Simulation(fleet(engine=config, on_disk=True), ranks_of((64, 8), 60))
    outcomes = simulation.run(generate(workload))
    assert all(outcome.finished for outcome in outcomes)
    assert simulation.tally.loads > 60


def test_two_workers_are_faster_than_one_overloaded_one() -> None:
    workload = Workload(20, rate_per_s=60, duration_s=4, lengths=SHORT)
    ranks = ranks_of((8,), 20)
    one, two = (
        summarize(Simulation(fleet(num_workers=n), ranks).run(generate(workload))) for n in (1, 2)
    )
    assert two.first_token.p50_s < one.first_token.p50_s
    assert two.makespan_s < one.makespan_s


def test_bytes_of_distinct_adapters_make_a_step_longer() -> None:
    costs = replace(COSTS, adapter_byte_s=1e-6)
    trace = [TracedRequest(0.0, index, 8, 16) for index in (0, 1)]
    shared = [replace(request, adapter=0) for request in trace]
    ends = [
        max(o.end_s for o in Simulation(fleet(costs=costs, on_disk=True), [16, 16]).run(requests))
        for requests in (trace, shared)
    ]
    assert ends[0] > ends[1]


def test_the_simulator_imports_no_torch() -> None:
    code = "import sys, loraplex_services.simulate.simulation; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_newest_request_starts_first_under_lcfs() -> None:
    trace = [TracedRequest(0.01 * i, None, 16, 8) for i in range(40)]
    newest_first = fleet(engine=engine_config(max_num_seqs=1), newest_first=True)
    outcomes = Simulation(newest_first, []).run(trace)
    firsts = [outcome.first_token_s or 0.0 for outcome in outcomes]
    late = [first_s for first_s in firsts if first_s > trace[-1].arrival_s + 0.1]
    assert len(late) > 10 and late == sorted(late, reverse=True)


def test_a_worker_that_has_every_adapter_tells_gateways_that_they_are_on_its_disk() -> None:
    [on_disk, in_store] = (
        SimulatedWorker(0, COSTS, engine_config(), on_disk=on_disk).view()
        for on_disk in (True, False)
    )
    assert on_disk.tier_of("any") is Tier.DISK and are_fetched([on_disk], ["any"])
    assert in_store.tier_of("any") is Tier.NONE and not are_fetched([in_store], ["any"])
