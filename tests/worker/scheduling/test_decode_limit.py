"""No tenant's decoding makes the steps of the others long."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from loraplex.api.request import BACKGROUND_PRIORITY
from loraplex_services.worker.scheduling.decode_limit import MAX_STRETCH, DecodeLimit
from loraplex_services.worker.scheduling.drafts import Drafts
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.running import Member, RunningBatch
from loraplex_services.worker.types.step_plan import StepPlan
from tests.worker.scheduling.stage import STEP_S, Stage, make_request, make_states

pytestmark = pytest.mark.hostile


def decoding(**num_requests: int) -> list[Member]:
    batch = RunningBatch()
    for tenant, count in num_requests.items():
        for index in range(count):
            request = make_request(f"{tenant}{index}", 1, tenant=tenant)
            request.num_computed, request.output_ids = 1, [7]
            batch.add(request, ())
            batch.caught_up(request)
    return batch.decoding


def taught(fixed_s: float, each_s: float, *sizes: int) -> DecodeLimit:
    limit = DecodeLimit()
    for size in sizes or (2, 100):
        rows = tuple(member.row(1) for member in decoding(any=size))
        limit.measure(StepPlan(0, rows), fixed_s + size * each_s)
    return limit


def num_rows(limit: DecodeLimit, members: list[Member], num_tenants: int = 2) -> Counter[str]:
    out = limit.skipping(members, 0, num_tenants)
    return Counter(member.request.tenant for member in members if member not in out)


@pytest.mark.parametrize(("fixed_s", "each_s"), [(0.002, 0.0001), (0.02, 0.0002)])
def test_a_flood_makes_the_steps_of_another_tenant_half_as_long_again_at_most(
    fixed_s: float, each_s: float
) -> None:
    rows = num_rows(taught(fixed_s, each_s), decoding(globex=120, acme=3))
    assert rows["acme"] == 3
    alone_s = fixed_s + 3 * each_s
    assert alone_s < fixed_s + rows.total() * each_s <= MAX_STRETCH * alone_s + each_s


def test_where_tokens_cost_next_to_nothing_nobody_sits_out() -> None:
    assert not taught(0.02, 1e-9).skipping(decoding(globex=120, acme=2), 0, 2)


def test_a_tenant_that_is_alone_and_tenants_of_equal_size_lose_nothing() -> None:
    limit = taught(0.0, 0.001)
    assert not limit.skipping(decoding(globex=50), 0, 1)
    assert not limit.skipping(decoding(globex=50, acme=50), 0, 2)


def test_between_two_requests_of_another_tenant_a_flood_does_not_fill_the_steps() -> None:
    limit = taught(0.002, 0.0001)
    assert num_rows(limit, decoding(globex=120))["globex"] <= 11


def test_until_steps_of_two_sizes_were_seen_tokens_count_as_all_of_the_cost() -> None:
    assert num_rows(taught(0.002, 0.0001, 100), decoding(globex=98, acme=2)) == {
        "acme": 2,
        "globex": 2,
    }
    assert not DecodeLimit().skipping(decoding(globex=98, acme=2), 0, 2)


def test_a_tenant_with_more_weight_may_fill_more_of_a_step() -> None:
    members = decoding(globex=50, acme=2)
    for member in members:
        member.request.fairness_weight = 4.0
    assert num_rows(taught(0.0, 0.001), members)["globex"] == 4


def test_the_drafts_of_a_flood_are_among_the_tokens_that_it_may_have() -> None:
    limit = taught(0.019, 0.001)
    members = decoding(globex=30, acme=2)
    out = limit.skipping(members, 0, 2)
    rows = [member.row(1) for member in members if member not in out]
    for row in rows:  # all of them repeat themselves
        row.request.prompt_ids, row.request.block_tables = [5, 6, 7, 5, 6, 7, 5, 6], [[0] * 9]
        row.request.output_ids, row.request.num_computed = [7], 8
    rows = [row._replace(start=8) for row in rows]
    drafts = Drafts(SchedulerLimits(256, 64, drafts=True), 16, make_states())
    tokens: Counter[str] = Counter()
    for row in drafts.added(rows, 0.0, limit.most_tokens):
        tokens[row.request.tenant] += row.num_tokens
    assert tokens["acme"] > 2
    assert tokens["globex"] == int(limit.most_tokens) == 10


def in_background(members: list[Member]) -> list[Member]:
    for member in members:
        member.request.priority = BACKGROUND_PRIORITY
    return members


@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_lines_of_a_batch_make_the_steps_of_other_requests_half_as_long_again_at_most(
    tenant: str,
) -> None:
    """Those of their own tenant, too; all lines have their turn."""
    limit, lines = taught(0.01, 0.001), in_background(decoding(acme=60))
    members = decoding(**{tenant: 3}) + lines
    seen: set[Member] = set()
    for step in range(12):
        out = limit.skipping(members, step, 1 if tenant == "acme" else 2)
        rows = [member for member in members if member not in out]
        assert rows[:3] == members[:3] and len(rows) - 3 == 6  # 10 ms + 9 x 1 ms <= 1.5 x 13 ms
        seen.update(rows)
    assert len(seen) == 63
    assert not limit.skipping(lines, 12, 1), "they are alone"


def test_no_request_gives_way_to_lines_of_a_batch() -> None:
    limit, lines = taught(0.0, 0.001), in_background(decoding(globex=2))
    members = decoding(acme=50) + lines
    assert set(limit.skipping(members, 0, 1)) <= set(lines)
    flood = decoding(acme=50, umbrella=2) + lines
    rows = num_rows(limit, flood)
    assert (rows["acme"], rows["umbrella"]) == (2, 2)


def test_what_a_draft_costs_is_learned_like_any_token() -> None:
    limit = taught(0.019, 0.001, 2)
    assert limit.most_tokens == math.inf
    rows = tuple(
        member.row(1)._replace(num_tokens=9, drafts=(7,) * 8) for member in decoding(acme=2)
    )
    limit.measure(StepPlan(0, rows), 0.019 + 18 * 0.001)
    assert num_rows(limit, decoding(globex=30, acme=2))["globex"] == 10


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_requests_of_a_flood_alternate_and_all_end(overlaps: bool) -> None:
    stage = Stage(60, overlaps=overlaps, max_running=12)
    stage.scheduler.decode_limit = taught(0.0, STEP_S)
    stage.submit(*(make_request(f"g{i}", 2, 6, tenant="globex") for i in range(9)))
    stage.submit(make_request("a", 2, 20, tenant="acme"))
    stage.step()
    rows: list[Counter[str]] = []
    for _ in range(18):
        plan = stage.step()
        rows.append(Counter(row.request.tenant for row in plan.rows if not row.is_context))
    assert all(row["acme"] == 1 for row in rows)
    assert all(row["globex"] <= 1 for row in rows[1:])
    progress = {len(r.output_ids) for r in stage.scheduler._running if r.tenant == "globex"}
    assert max(progress) - min(progress) <= 2
    stage.run_dry()
    assert sorted(stage.finished) == ["a", *(f"g{i}" for i in range(9))]
