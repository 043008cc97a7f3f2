"""Traces of requests to many adapters, and the results of running them.

What this package exports is pure. `driving` sends a trace through a gateway, and `adapter_variants`
makes the adapters for it.
"""

from loraplex.workload.log_file import LoggedRequest, read_log, sample_log
from loraplex.workload.metrics import RequestOutcome, Summary, summarize
from loraplex.workload.trace import (
    RANK_MIXES,
    Arrivals,
    LogNormalLengths,
    TracedRequest,
    UniformLengths,
    Workload,
    generate,
    ranks_of,
)

__all__ = [
    "RANK_MIXES",
    "Arrivals",
    "LogNormalLengths",
    "LoggedRequest",
    "RequestOutcome",
    "Summary",
    "TracedRequest",
    "UniformLengths",
    "Workload",
    "generate",
    "ranks_of",
    "read_log",
    "sample_log",
    "summarize",
]
