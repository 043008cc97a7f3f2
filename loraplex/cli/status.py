"""Prints the load of workers and the adapters that they hold, for `status` and `top`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from loraplex.cli.output import print_fields, print_json, print_table, sized
from loraplex.units import counted

if TYPE_CHECKING:
    from loraplex.api.residency import AdapterResidency
    from loraplex.client.generation import (
        Status,
        WorkerStatus,
    )


def print_status(status: Status, *, as_json: bool) -> None:
    """Print a status as tables, or as one JSON object."""
    if as_json:
        print_json(status_object(status))
        return
    print_fields(
        {
            "ready": "yes" if status.ready else f"no: {status.not_ready_reason}",
            "bases": ", ".join(status.base_ids) or "none",
            "registry": "connected"
            if status.registry_connected
            else "unreachable; the last snapshot is in use",
            "adapters": str(status.num_adapters),
            "requests": f"{status.running_requests} running, {status.queued_requests} queued",
        }
    )
    rows = [
        (
            worker.worker_id or worker.address,
            state_of(worker),
            str(worker.load.running_requests),
            str(worker.load.waiting_requests),
            f"{worker.load.total_blocks - worker.load.free_blocks}/{worker.load.total_blocks}",
            str(worker.load.idle_blocks),
            str(worker.num_adapters_on_device),
            str(worker.load.max_distinct_adapters),
            f"{worker.load.step_s * 1000:.1f} ms",
            " ".join((worker.dtype, worker.kernels, worker.quantization)).strip(),
        )
        for worker in status.workers
    ]
    print()
    load = ("RUN", "WAIT", "BLOCKS", "CACHED", "ON DEVICE", "MOST ADAPTERS IN A STEP", "STEP")
    print_table(("WORKER", "STATE", *load, "ARITHMETIC"), rows)
    for worker in status.workers:
        for adapter in worker.adapters:
            where = adapter.residency
            size = sized(where.device_bytes)
            name = adapter.ref or where.digest
            if adapter.num_other_refs:
                name += f" (+{counted(adapter.num_other_refs, 'name')})"
            rank = f"rank {where.max_rank}"
            print(f"  {worker.worker_id}  {name}  {_tier_name(where)}  {rank}  {size}")


def status_object(status: Status) -> dict[str, Any]:
    """The status as JSON, with load and residency flattened into their workers and adapters."""
    shown = dataclasses.asdict(status)
    for worker, shown_worker in zip(status.workers, shown["workers"], strict=True):
        shown_worker |= shown_worker.pop("load")
        for adapter, shown_adapter in zip(worker.adapters, shown_worker["adapters"], strict=True):
            shown_adapter |= shown_adapter.pop("residency")
            shown_adapter["tier"] = _tier_name(adapter.residency)
    return shown


def _tier_name(residency: AdapterResidency) -> str:
    return residency.tier.name.lower()


def state_of(worker: WorkerStatus) -> str:
    """One word about a worker."""
    if not worker.connected:
        return "unreachable"
    if worker.draining:
        return "draining"
    return "ready" if worker.ready else "starting"
