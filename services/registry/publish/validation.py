"""Validates adapters: quick ones in a thread, others in shared processes.

Versions of one training run have the same config and header, so a result is kept under these for a
while. An adapter that was refused is validated again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from loraplex.adapter_format import CONFIG_FILE, Geometry, Header, Report
from loraplex.adapter_format.patterns import has_expressions
from loraplex.adapter_format.strict_json import read_object
from loraplex.errors import InvalidAdapter, Violation
from loraplex_services.common.limits import VALIDATIONS, PoolLimits
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.processes.process_pool import JobFailed, ProcessPool
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.registry.publish.validation_process import ValidationJob, ValidationOutcome

SMALL_BYTES = 64 << 10
"""Config and header of up to 500 tensors take milliseconds, if the config is a short one of plain
names. Thousands of patterns or a few expressions take up to a second."""
_SMALL_CONFIG_BYTES = 4 << 10
_NUM_THREADS = 2
_MAX_KEPT_BYTES = 32 << 20
_OBJECTS_BYTES = 10
"""Memory that a description takes for each byte of its header."""
_MODULE = "loraplex_services.registry.publish.validation_process"


_Key = tuple[bytes, bytes, tuple[tuple[str, int], ...], tuple[str, ...], tuple[int, ...]]


class Validations:
    """Checks configs and headers against bases. The processes start when they are first needed."""

    def __init__(self, limits: PoolLimits = VALIDATIONS) -> None:
        self._limits = limits
        self._pool = ProcessPool(_MODULE, limits)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="validation")
        """Separate from the threads that read and write objects, which must not wait for these."""
        self._slots = TenantSlots(_NUM_THREADS)
        self._kept: LruCache[_Key, tuple[Geometry, Report, Header]] = LruCache(_MAX_KEPT_BYTES)

    async def check(self, tenant: str, job: ValidationJob) -> tuple[Report, Header]:
        """A valid adapter's description and header.

        Args:
            tenant: who asks; tenants get the processes in rotation.

        Raises:
            InvalidAdapter: with every violation.
            ResourceExhausted: the tenant has too many validations waiting.
        """
        loop = asyncio.get_running_loop()
        num_bytes = len(job.config_bytes) + len(job.header_bytes)
        if num_bytes > SMALL_BYTES:
            return await self._run_apart(tenant, job)
        kept = self._kept.get(key := _key_of(job))
        if kept is not None and kept[0] is job.geometry:
            return kept[1:]
        if _is_quick(job.config_bytes):
            async with self._slots.held(tenant, "validations"):
                valid = await loop.run_in_executor(self._threads, job.run)
        else:
            valid = await self._run_apart(tenant, job)
        self._kept.put(key, (job.geometry, *valid), _OBJECTS_BYTES * num_bytes)
        return valid

    async def close(self) -> None:
        """End the processes and threads."""
        await self._pool.close()
        self._threads.shutdown(wait=False)

    async def _run_apart(self, tenant: str, job: ValidationJob) -> tuple[Report, Header]:
        """Run a job in a process. Raises as `check`."""
        try:
            answer = await self._pool.ask(tenant, msgspec.msgpack.encode(job))
        except JobFailed as failed:
            raise InvalidAdapter.of([self._violation(failed)]) from None
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._threads, _outcome, answer)
        if outcome.valid is None:
            raise InvalidAdapter.of(outcome.violations)
        return outcome.valid

    def _violation(self, failed: JobFailed) -> Violation:
        description = (
            f"takes longer than {self._limits.timeout_s:g} s to validate"
            if failed.is_late
            else "needs too much memory to validate"
        )
        return Violation.of(
            "adapter_model.safetensors", "header", f"{description}; it has too many tensors"
        )


def _is_quick(config_bytes: bytes) -> bool:
    """Whether a config takes no longer than its header. Raises: InvalidAdapter if it is not
    JSON."""
    if len(config_bytes) > _SMALL_CONFIG_BYTES:
        return False
    return not has_expressions(read_object(config_bytes, CONFIG_FILE, _SMALL_CONFIG_BYTES))


def _key_of(job: ValidationJob) -> _Key:
    """All that a valid adapter's description depends on besides the geometry. The content of its
    files is not looked at."""
    files = tuple((file.path, file.size) for file in job.files)
    sizes = job.tensor_file_size, job.max_rank, job.strict, job.allow_missing
    return job.config_bytes, job.header_bytes, files, job.base_names, sizes


def _outcome(answer: bytes) -> ValidationOutcome:
    return msgspec.msgpack.decode(answer, type=ValidationOutcome)
