"""The metrics of the registry. Labels are bounded: outcomes, never adapters or tenants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import Counter, Gauge

from loraplex.errors import LoraplexError

UPLOADS = Counter(
    "loraplex_registry_uploads_total",
    "Uploads by outcome: created, unchanged (the content was there), or the reason of the refusal. "
    "Refused dry runs count, too: most clients check an upload before they send it.",
    ["outcome"],
)
RECEIVED_BYTES = Counter(
    "loraplex_registry_received_bytes_total",
    "Bytes of uploads that are stored in the object store.",
)
WATCHERS = Gauge("loraplex_registry_watchers", "Open watches: gateways and `registry watch`.")
INDEX_LAG_S = Gauge(
    "loraplex_registry_index_lag_seconds",
    "Age of the oldest change that has begun and is not in the index, 0 = none; the time since the "
    "last check while the index cannot be checked.",
)
METADATA_BYTES = Gauge(
    "loraplex_registry_metadata_bytes", "Memory that the metadata server uses; 0 = not known."
)
METADATA_MAX_BYTES = Gauge(
    "loraplex_registry_metadata_max_bytes", "Its maxmemory; 0 = no limit, or not known."
)
REBUILDS = Counter(
    "loraplex_registry_index_rebuilds_total", "Indexes rebuilt from the objects by this process."
)


@contextlib.contextmanager
def refusals_counted() -> Iterator[None]:
    """Count an upload that fails inside the block, by its reason."""
    try:
        yield
    except LoraplexError as error:
        UPLOADS.labels(error.reason.lower()).inc()
        raise
