"""A batch job as it is stored. One gateway at a time owns and runs it.

Its owner renews the document every few seconds. A gateway that sees it unchanged for longer than a
lease takes over, by compare-and-set. Should the former owner go on, it does no harm: of two results
for one line the first one stays, and the former owner's next renewal fails.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from loraplex_services.common.ulid import ulid

WINDOW_S = 24 * 3600
"""The only completion window."""
Ending = Literal["completed", "cancelled", "expired", "failed"]
BatchStatus = Literal["validating", "in_progress", "finalizing", "cancelling", Ending]
VALIDATING: Final = "validating"
IN_PROGRESS: Final = "in_progress"
FINALIZING: Final = "finalizing"
CANCELLING: Final = "cancelling"
COMPLETED: Final = "completed"
CANCELLED: Final = "cancelled"
EXPIRED: Final = "expired"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines that have a result, and what they used."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.completed + other.completed,
            self.failed + other.failed,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a whole batch job failed, or one line of it."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The document of a batch job, with its progress. Times are unix seconds; 0 = not yet."""

    batch_id: str
    tenant: str
    key_id: str
    """The key that created it, with which it runs; "" without auth."""
    scopes: tuple[str, ...]
    """Scopes of that key."""
    endpoint: str
    input_file_id: str
    created_s: int
    output_lifetime_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    status: BatchStatus = VALIDATING
    owner: str = ""
    """The gateway that runs it; "" = none."""
    renewals: int = 0
    """Changes with every renewal, so that the document does."""
    ending: Literal[Ending, ""] = ""
    """The status that it will have in the end; "" = not decided."""
    num_lines: int = 0
    counts: Counts = field(default_factory=Counts)
    output_file_id: str = ""
    error_file_id: str = ""
    """Both are chosen when results are put together, and shown when the batch job has ended."""
    errors: tuple[BatchError, ...] = ()
    in_progress_s: int = 0
    finalizing_s: int = 0
    cancelling_s: int = 0
    ended_s: int = 0

    @property
    def expires_s(self) -> int:
        """When lines without a result are given up."""
        return self.created_s + WINDOW_S

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in get_args(Ending)


def new_batch_id() -> str:
    """Ids sort by time."""
    return f"batch_{ulid(time.time())}"


def now_s() -> int:
    """Unix time in whole seconds, as batch jobs have it."""
    return int(time.time())


def cancelled(record: BatchRecord) -> BatchRecord | None:
    """The batch job once its tenant wants it to end; None if that changes nothing."""
    if record.status in (CANCELLING, FINALIZING) or record.has_ended:
        return None
    return replace(record, status=CANCELLING, ending=CANCELLED, cancelling_s=now_s())
