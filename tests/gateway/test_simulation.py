"""Whole gateways over simulated workers, with seeded faults: no stream is lost, doubled or changed.

Time is virtual and everything follows from the seed: a seed that fails fails again.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from loraplex.api.request import TokenPrompt
from loraplex.api.sampling import Sampling
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.request import GenerateCall
from loraplex_services.gateway.workers.link import SILENT_CHECKS
from tests.gateway.simulated.chaos import Chaos
from tests.gateway.simulated.house import House, Seen, undisturbed
from tests.gateway.simulated.worker import BASE_ID, Speed
from tests.virtual_time import run_virtually


def _run(seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        chaos = Chaos(seed)
        try:
            run_virtually(chaos.run())
        except Exception as error:
            error.add_note(f"seed {seed}: {chaos.faults}")
            raise
        total += chaos.outcomes()
    return total


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_accepted_streams_survive_seeded_faults(part: int) -> None:
    found = _run(range(50 * part, 50 * (part + 1)))
    assert found["whole"] > 100


def test_a_stream_without_a_worker_ends_at_its_deadline_and_says_so() -> None:
    """One of ten thousand seeds: rounding put the end of the wait before the deadline."""
    assert _run(range(14_149, 14_150))["DEADLINE_EXCEEDED"] > 0


def test_a_worker_that_falls_silent_loses_its_streams_to_another() -> None:
    """Its connections stand, nothing comes: as with a stopped process or a dead switch."""

    async def main() -> list[Seen]:
        house = House(1, workers=["w0", "w1"], speed=Speed(step_s=0.05))
        await house.start(1, AdmissionLimits())
        calls = [
            GenerateCall(
                request_id=f"r{n}",
                tenant="t",
                model=BASE_ID,
                prompt=TokenPrompt((n,)),
                sampling=Sampling(max_tokens=40, ignore_eos=True),
            )
            for n in range(6)
        ]
        clients = [asyncio.create_task(house.ask(house.gateways[0], call)) for call in calls]
        await asyncio.sleep(1.0)
        assert min(worker.num_live for worker in house.workers.values()) > 0
        house.workers["w0"].way.stalled_until_s = 1e6
        seen = await asyncio.gather(*clients)
        await house.close()
        return seen

    for seen in run_virtually(main()):
        assert seen.is_whole and seen.prepared is not None
        ids = tuple(i for text_delta in seen.text_deltas for i in text_delta.token_ids)
        assert ids == undisturbed(seen.prepared, 0).token_ids
        assert seen.ended_s - seen.began_s < SILENT_CHECKS + 5


def test_requests_for_a_cold_adapter_share_one_load() -> None:
    """All come in one moment, before any worker has said that it loads the adapter."""

    async def main() -> list[int]:
        house = House(1, workers=["w0", "w1", "w2", "w3"], adapters=["a"])
        await house.start(1, AdmissionLimits())
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        calls = [
            GenerateCall(
                request_id=f"r{n}",
                tenant="t",
                model="a",
                prompt=TokenPrompt((n,)),
                sampling=sampling,
            )
            for n in range(6)
        ]
        await asyncio.gather(*[house.ask(house.gateways[0], call) for call in calls])
        await house.close()
        return sorted(worker.num_submitted for worker in house.workers.values())

    assert run_virtually(main()) == [0, 0, 0, 6]


def test_the_same_seed_gives_the_same_run() -> None:
    def moments(seed: int) -> list[tuple[float, float, float]]:
        chaos = Chaos(seed)
        run_virtually(chaos.run())
        return [(seen.began_s, seen.first_s, seen.ended_s) for seen in chaos.seen]

    assert moments(7) == moments(7)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_accepted_streams_survive_ten_thousand_seeds() -> None:
    print(_run(range(10_000, 20_000)))
