"""The audit log is read from its end, and a page costs what it shows."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path

import pytest

from loraplex.api.tenants import Tenant
from loraplex.errors import InvalidRequest
from loraplex_services.common.callers import note_read
from loraplex_services.common.objects import ObjectInfo, open_store
from loraplex_services.common.ulid import first_ulid, time_of_ulid, ulid
from loraplex_services.registry import layout
from loraplex_services.registry.access import audit
from loraplex_services.registry.access.audit import Audit
from tests.registry.conftest import ServedRegistry

NOW_S = 1_790_000_000.0
YEAR_S = 365 * 86_400.0


async def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times_s: list[float]) -> Audit:
    """A log with an entry at each time, read at NOW_S."""
    log = Audit(open_store(f"file://{tmp_path}/objects"))
    for number, time_s in enumerate(times_s):
        monkeypatch.setattr(audit, "now_s", lambda at=time_s: at)
        await log.write("me", "acme" if number % 3 else "default", "test", str(number))
    monkeypatch.setattr(audit, "now_s", lambda: NOW_S)
    return log


async def _pages(log: Audit, tenant: str, page_size: int = 1000) -> list[list[str]]:
    """The subjects of each page."""
    pages: list[list[str]] = []
    token = ""
    while not pages or token:
        entries, token = await log.page(tenant, page_size, token)
        pages.append([entry.subject for entry in entries])
    return pages


async def _all(log: Audit, tenant: str, page_size: int) -> list[str]:
    pages = await _pages(log, tenant, page_size)
    assert all(len(page) == page_size for page in pages[:-1])
    return [*chain.from_iterable(pages)]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
)
async def test_pages_show_every_entry_once_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Bursts, gaps of years, and a clock that runs ahead."""
    rng = random.Random(seed)
    ages_s = [rng.choice([1, 50, 3e3, 9e4, YEAR_S, 5 * YEAR_S]) * rng.random() for _ in range(60)]
    times_s = sorted({round(NOW_S - age_s, 3) for age_s in [*ages_s, -7200.0]})
    log = await _written(tmp_path, monkeypatch, times_s)
    newest_first = [str(number) for number in reversed(range(len(times_s)))]
    for page_size in (1, 7, 1000):
        assert await _all(log, "", page_size) == newest_first
    own = [subject for subject in newest_first if int(subject) % 3 == 0]
    assert await _all(log, "default", 5) == own


async def test_a_page_does_not_list_the_whole_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = [NOW_S - 3600.0 * hour for hour in range(1, 400)]
    log = await _written(tmp_path, monkeypatch, times_s)
    seen: list[str] = []
    listed = log._store.list_objects

    async def counting(prefix: str, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in listed(prefix, start_after):
            seen.append(info.key)
            yield info

    monkeypatch.setattr(log._store, "list_objects", counting)
    entries, token = await log.page("", 10)
    assert [entry.subject for entry in entries] == [str(number) for number in range(10)]
    assert token and len(seen) < 100, "each window also lists the key after its end"


async def test_an_empty_log_has_one_empty_page(tmp_path: Path) -> None:
    assert await Audit(open_store(f"file://{tmp_path}/objects")).page("", 10) == ([], "")


async def test_a_damaged_entry_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await _written(tmp_path, monkeypatch, [NOW_S - 60.0 * age for age in range(5, 0, -1)])
    _, damaged = await log.page("", 2)
    await log._store.delete(damaged)
    await log._store.put_if_absent(damaged, b"{")
    for page_size in (1, 2, 10):
        assert await _all(log, "", page_size) == ["4", "2", "1", "0"]


@pytest.mark.parametrize("token", ["x", "audit/~", "keys/a.json", layout.audit("2026-01-01", "u")])
async def test_a_token_of_another_list_is_refused_by_name(tmp_path: Path, token: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await Audit(open_store(f"file://{tmp_path}/objects")).page("", 10, token)
    assert refused.value.violations[0].field == "page_token"


def test_identifiers_sort_by_time_and_tell_it() -> None:
    times_s = [0.0, 1.0, NOW_S, NOW_S + 0.001]
    made = [ulid(time_s) for time_s in times_s]
    assert made == sorted(made)
    for time_s, text in zip(times_s, made, strict=True):
        assert abs(time_of_ulid(text) - time_s) < 0.002
        assert first_ulid(time_s) <= text


async def test_a_change_of_a_tenant_s_limits_says_what_they_are_now(served: ServedRegistry) -> None:
    wanted = Tenant("acme", tokens_per_s=1000.0, max_concurrent=8, fairness_weight=2.0)
    await served.client.admin.set_tenant(wanted)
    [entry] = [each async for each in served.client.admin.audit("acme")]
    assert entry.action == "tenant.set"
    assert entry.details == {
        "max_bytes": "0",
        "max_versions": "0",
        "requests_per_s": "0.0",
        "tokens_per_s": "1000.0",
        "max_concurrent": "8",
        "fairness_weight": "2.0",
        "signature_keys": "0",
        "max_kl": "0.0",
    }


@pytest.mark.hostile
async def test_a_page_for_a_tenant_with_few_entries_reads_a_bounded_part_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_BATCH_KEYS", 5)
    monkeypatch.setattr(audit, "_MAX_READ", 20)
    log = await _written(tmp_path, monkeypatch, [NOW_S - 10.0 * n for n in range(100, 0, -1)])
    num_read: list[int] = []
    reading = note_read.set(num_read.append)
    entries, token = await log.page("globex", 1000)
    note_read.reset(reading)
    assert not entries and token
    assert 20 <= sum(num_read) <= 25
    pages = await _pages(log, "default")
    assert [*chain.from_iterable(pages)] == [str(number) for number in range(99, -1, -3)]
    assert len(pages) >= 4


async def test_a_page_does_not_end_at_a_file_that_is_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is no page token, so that nobody could go on from there."""
    monkeypatch.setattr(audit, "_BATCH_KEYS", 1)
    monkeypatch.setattr(audit, "_MAX_READ", 1)
    log = await _written(tmp_path, monkeypatch, [NOW_S - 10.0 * n for n in range(5, 0, -1)])
    await log._store.put(f"{layout.AUDIT}{audit._date(NOW_S)}/notes.txt", b"no entry")
    pages = await _pages(log, "")
    assert [*chain.from_iterable(pages)] == ["4", "3", "2", "1", "0"]
