"""What /debug/state of a worker shows."""

from __future__ import annotations

import json

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.worker.server.debug_state import MAX_LISTED, worker_state
from loraplex_services.worker.server.sessions import (
    GatewaySession,
    ServerRequest,
    ServerRequests,
    SessionUpdate,
)
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import ResidencyChange

ENGINE = {"is_up": True}


def test_each_request_says_what_it_waits_for() -> None:
    status, session, requests = StatusBoard(), GatewaySession(1, "g"), ServerRequests()
    loaded, missing = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    residency = AdapterResidency(loaded, Tier.DEVICE, 8, 4096, running_requests=1)
    status.update([ResidencyChange(residency)], WorkerLoad(waiting_requests=2))
    session.push(SessionUpdate(1))
    for name, digests in (("runs", [loaded]), ("loads", [loaded, missing]), ("waits", [loaded])):
        requests.add(ServerRequest(session, name, tuple(digests), 7, arrival_s=10.0))
    for request in requests:
        request.has_entered = request.request_id == "runs"
    state = json.loads(json.dumps(worker_state(status, ENGINE, [session], requests, now_s=12.5)))
    stages = {each["request_id"]: each["stage"] for each in state["oldest_requests"]}
    assert stages == {
        "runs": "running",
        "loads": "waiting for an adapter",
        "waits": "waiting to be scheduled",
    }
    assert {each["age_s"] for each in state["oldest_requests"]} == {2.5}
    assert state["sessions"] == [{"gateway_id": "g", "num_requests": 3, "num_unread": 1}]
    assert state["load"]["waiting_requests"] == 2 and state["engine"]["is_up"]
    assert state["num_adapters"] == {"device": 1} and state["adapters"][0]["digest"] == loaded


def test_lists_are_bounded_and_numbers_are_not() -> None:
    status, session, requests = StatusBoard(), GatewaySession(1, "g"), ServerRequests()
    for index in range(2 * MAX_LISTED):
        requests.add(ServerRequest(session, f"r{index}", (), 7, arrival_s=float(index)))
        residency = AdapterResidency(f"sha256:{index:064x}", Tier.DISK)
        status.update([ResidencyChange(residency)], WorkerLoad())
    state = worker_state(status, ENGINE, [session] * 2 * MAX_LISTED, requests, now_s=1000.0)
    assert state["num_requests"] == 2 * MAX_LISTED and state["num_adapters"]["disk"] == 200
    lengths = {len(state[name]) for name in ("sessions", "oldest_requests", "adapters")}
    assert lengths == {MAX_LISTED}
    assert state["oldest_requests"][0]["request_id"] == "r0"
