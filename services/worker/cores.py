"""Counts the processor cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Cores that the affinity and the container's CPU limit allow, rounded down; at least 1.

    More threads than the limit has cores would all stop together when its share of a period is
    used up, and step for step wait for each other.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, _limit(cgroups))))


def _limit(cgroups: Path) -> float:
    """Cores' worth of time that the cgroup (version 2, else 1) grants; infinite without a limit."""
    try:
        if (cgroups / "cpu.max").exists():
            quota, period = (cgroups / "cpu.max").read_text().split()
        else:
            quota = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")
