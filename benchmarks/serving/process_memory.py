"""Memory of the services under this process, each with the processes that it started."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from pathlib import Path

SERVICES = ("gateway", "registry", "worker")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ELSEWHERE = ("valkey-server", "redis-server")
"""In a cluster the metadata server has a pod of its own."""


def service_bytes() -> dict[str, int]:
    """Resident bytes by service. Pages that processes share count for each of them."""
    children: dict[int, list[int]] = defaultdict(list)
    commands, resident = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            pid = int(entry.name)
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            commands[pid] = (entry / "cmdline").read_bytes().decode(errors="replace")
            resident[pid] = int((entry / "statm").read_text().split()[1]) * _PAGE_BYTES
            children[parent].append(pid)

    def tree(pid: int) -> int:
        if any(name in commands.get(pid, "") for name in _ELSEWHERE):
            return 0
        return resident.get(pid, 0) + sum(tree(child) for child in children[pid])

    def services(pid: int, found: dict[str, int]) -> None:
        for child in children[pid]:
            words = commands.get(child, "").split("\0")
            name = next((n for n in SERVICES if f"loraplex_services.{n}" in words), None)
            if name is None:
                services(child, found)
            else:
                found[name] = found.get(name, 0) + tree(child)

    found: dict[str, int] = {}
    services(os.getpid(), found)
    return found


class PeakMemory:
    """Looks every `interval_s` on a thread; `peaks` are the largest sums seen."""

    def __init__(self, interval_s: float = 0.1) -> None:
        self.peaks: dict[str, int] = {}
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._interval_s):
            for name, num_bytes in service_bytes().items():
                self.peaks[name] = max(self.peaks.get(name, 0), num_bytes)
