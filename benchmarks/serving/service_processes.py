"""Memory and processor time of the services under this process, each with the processes that it
started."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVICES = ("gateway", "registry", "worker")
INTERVAL_S = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ELSEWHERE = ("valkey-server", "redis-server")
"""In a cluster the metadata server has a pod of its own."""


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of processor time, by the priority at which they were spent."""

    usual_s: float = 0.0
    low_s: float = 0.0
    """Seconds of processes with a lower priority than this one: those of pools, also if they have
    ended."""

    def __add__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.usual_s + other.usual_s, self.low_s + other.low_s)

    def __sub__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.usual_s - other.usual_s, self.low_s - other.low_s)


class _Processes:
    """The processes of this machine at one time."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = defaultdict(list)
        self._commands: dict[int, str] = {}
        self._resident: dict[int, int] = {}
        self._times: dict[int, ProcessorTime] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    self._look_at(entry)

    def _look_at(self, entry: Path) -> None:
        pid = int(entry.name)
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        parent = int(fields[1])
        own_s, ended_s = (sum(map(int, fields[i : i + 2])) / _TICKS_PER_S for i in (11, 13))
        is_low = int(fields[16]) > os.getpriority(os.PRIO_PROCESS, 0)
        self._times[pid] = (
            ProcessorTime(0.0, own_s + ended_s) if is_low else ProcessorTime(own_s, ended_s)
        )
        self._commands[pid] = (entry / "cmdline").read_bytes().decode(errors="replace")
        self._resident[pid] = int((entry / "statm").read_text().split()[1]) * _PAGE_BYTES
        self._children[parent].append(pid)

    def services_below(self, pid: int) -> Iterator[tuple[str, int]]:
        """Name and process of each service that a process started, or those below it."""
        for child in self._children[pid]:
            words = self._commands.get(child, "").split("\0")
            name = next((n for n in SERVICES if f"loraplex_services.{n}" in words), None)
            if name is None:
                yield from self.services_below(child)
            else:
                yield name, child

    def bytes_of(self, pid: int) -> int:
        """Resident bytes of a process and all below it."""
        if any(name in self._commands.get(pid, "") for name in _ELSEWHERE):
            return 0
        below = sum(self.bytes_of(child) for child in self._children[pid])
        return self._resident.get(pid, 0) + below

    def time_of(self, pid: int) -> ProcessorTime:
        """Processor time of a process and all that it started."""
        below = (self.time_of(child) for child in self._children[pid])
        return sum(below, self._times.get(pid, ProcessorTime()))


def service_processes() -> list[tuple[str, int]]:
    """Name and process of each service under this process."""
    return list(_Processes().services_below(os.getpid()))


def service_bytes() -> dict[str, int]:
    """Resident bytes by service. Pages that processes share count for each of them."""
    processes = _Processes()
    found: Counter[str] = Counter()
    for name, pid in processes.services_below(os.getpid()):
        found[name] += processes.bytes_of(pid)
    return dict(found)


def service_time() -> ProcessorTime:
    """Processor time that the services under this process have spent so far."""
    processes = _Processes()
    services = processes.services_below(os.getpid())
    return sum((processes.time_of(pid) for _, pid in services), ProcessorTime())


class PeakMemory:
    """Looks every `INTERVAL_S` on a thread; `peaks` are the largest sums seen."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            for name, num_bytes in service_bytes().items():
                self.peaks[name] = max(self.peaks.get(name, 0), num_bytes)
