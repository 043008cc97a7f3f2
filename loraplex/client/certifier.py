"""Certifies versions on the served base against a reference: one, or each as it is published."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex.api.registry import AdapterVersion, Certificate
from loraplex.client.divergence import measure, probe_sha256, served_quantization
from loraplex.client.inference_client import InferenceClient
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import (
    Blocked,
    DeadlineExceeded,
    InvalidAdapter,
    LoraplexError,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Violation,
)

GENERATES = "CAUSAL_LM"
TRANSIENT = (Blocked, DeadlineExceeded, NotFound, ResourceExhausted, Unavailable)
"""Errors that may be gone later: a gateway that does not know the version yet, no free worker."""
RETRY_S = 30.0
Report = Callable[[AdapterVersion, Certificate | LoraplexError], None]
"""Called with the certificate of a version, or the error that prevented it."""


@dataclass(frozen=True, slots=True)
class Certifier:
    """Measures with two gateways and keeps the results in a registry."""

    registry: RegistryClient
    served: InferenceClient
    reference: InferenceClient
    reference_name: str
    """Address of the reference, as certificates name it."""
    texts: Sequence[str]
    max_kl: float | None = None
    """Largest mean divergence, in nats per token, of a version that passes; None = any."""
    tag: str = ""
    """Points at a version that passes; "" = none."""

    async def certify(self, version: AdapterVersion, reference_model: str = "") -> Certificate:
        """Measure a version, keep the result, and move the tag.

        Args:
            reference_model: its name on the reference; "" = the same.

        Raises:
            InvalidAdapter: it diverges more than `max_kl`. The certificate is kept.
            Blocked: workers of its base differ in what they quantise.
            NotCertified: its tenant has a lower bound, and the tag stays where it is.
        """
        certificate = await self._measured(version, reference_model or version.ref)
        if self.tag:
            await self.registry.set_tag(_name(version), self.tag, {version.version: 1})
        return certificate

    async def follow(self, report: Report) -> None:
        """Certify each version that has no certificate of this measurement, newest first, and
        those that are published later; does not end.

        Versions of bases that the gateway does not serve wait, and adapters that do not generate
        are left out. A version that cannot be measured now is tried again every 30 seconds, and
        reported once. The tag only moves forward, from one version to a later one of its adapter.

        Raises:
            Unavailable: at the start, the gateway or the registry does not answer.
            Unauthenticated: the key is not valid.
        """
        await self.served.status()
        await self.registry.admin.bases()
        waiting: dict[str, AdapterVersion] = {}
        reported: set[str] = set()
        arrived = asyncio.Event()
        watch = asyncio.create_task(self._collect(waiting, arrived))
        try:
            while not watch.done():
                arrived.clear()
                with contextlib.suppress(Unavailable):
                    await self._round(waiting, reported, report)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), RETRY_S)
            await watch
        finally:
            watch.cancel()

    async def _collect(self, waiting: dict[str, AdapterVersion], arrived: asyncio.Event) -> None:
        """Add what the registry reports to `waiting`, and remove what is deleted."""
        token = ""
        while True:
            try:
                async for change in self.registry.watch(token):
                    token = change.resume_token or token
                    if (version := change.version) is None:
                        continue
                    waiting.pop(version.ref, None)
                    if not version.deleted and version.task == GENERATES:
                        waiting[version.ref] = version
                        arrived.set()
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _round(
        self, waiting: dict[str, AdapterVersion], reported: set[str], report: Report
    ) -> None:
        """Try every version that waits once, also those that arrive meanwhile."""
        workers = (await self.served.status()).workers
        bases = {worker.base_id for worker in workers if worker.ready}
        tried: set[str] = set()
        while left := [
            version
            for ref, version in waiting.items()
            if ref not in tried and version.base_id in bases
        ]:
            version = max(left, key=lambda version: version.created_unix_s)
            tried.add(version.ref)
            try:
                outcome: Certificate | LoraplexError | None = await self._try(version)
            except Unauthenticated:
                raise
            except LoraplexError as error:
                outcome = error
            if not isinstance(outcome, TRANSIENT):
                waiting.pop(version.ref, None)
            if isinstance(outcome, Certificate):
                report(version, outcome)
            elif outcome is not None and version.ref not in reported:
                reported.add(version.ref)
                report(version, outcome)

    async def _try(self, version: AdapterVersion) -> Certificate | None:
        """Certify a version, unless it has a certificate of this measurement: then None."""
        quantization = await served_quantization(self.served, version.base_id)
        probe = probe_sha256(self.texts)
        for known in await self.registry.admin.certificates(version.ref):
            subject = known.base_id, known.quantization, known.reference, known.probe_sha256
            if subject == (version.base_id, quantization, self._about(version.ref), probe):
                return None
        certificate = await self._measured(version, version.ref)
        if self.tag:
            await self._move_forward(version)
        return certificate

    async def _move_forward(self, version: AdapterVersion) -> None:
        """Point the tag at a version, unless somebody pointed it at a later one or split it."""
        tags = {tag.tag: tag for tag in (await self.registry.get(version.ref)).tags}
        expect = "none"
        if (tag := tags.get(self.tag)) is not None and tag.targets:
            [first, *others] = tag.targets
            if others or first.version >= version.version:
                return
            expect = first.digest
        name = _name(version)
        await self.registry.set_tag(name, self.tag, {version.version: 1}, expect=expect)

    async def _measured(self, version: AdapterVersion, theirs: str) -> Certificate:
        """Measure a version and store the certificate. Raises InvalidAdapter above `max_kl`."""
        quantization = await served_quantization(self.served, version.base_id)
        found = await measure(self.served, self.reference, version.ref, theirs, self.texts)
        measured = Certificate(
            base_id=version.base_id,
            reference=self._about(theirs),
            probe_sha256=probe_sha256(self.texts),
            num_tokens=found.num_tokens,
            mean_kl=found.mean_kl,
            max_kl=found.max_kl,
            top1_agreement=found.top1_agreement,
            quantization=quantization,
        )
        certificate = await self.registry.admin.set_certificate(version.ref, measured)
        if self.max_kl is not None and certificate.mean_kl > self.max_kl:
            why = (
                f"{version.ref} diverges more from {certificate.reference} than --max-kl "
                f"{self.max_kl:g} allows, in nats per token"
            )
            raise InvalidAdapter.of([Violation.of("mean_kl", f"{certificate.mean_kl:.3g}", why)])
        return certificate

    def _about(self, theirs: str) -> str:
        return f"{theirs} at {self.reference_name}"


def _name(version: AdapterVersion) -> str:
    return f"{version.tenant}/{version.name}"
