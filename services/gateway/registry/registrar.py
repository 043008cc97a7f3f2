"""Registers the geometry of every served base, and retries until the registry accepts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from loraplex.errors import AlreadyExists, InvalidRequest, LoraplexError
from loraplex.v1 import registry_pb2, worker_pb2
from loraplex_services.gateway.registry.link import RegistryLink

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_WAY_OUT = "LORAPLEX_SERVED_MODEL_NAME of the worker"


class BaseRegistrar:
    """Tracks which bases are not registered yet, and why."""

    def __init__(
        self,
        registry: RegistryLink,
        on_clash: Callable[[LoraplexError], None],
        *,
        replaces: bool,
    ) -> None:
        """
        Args:
            on_clash: called with every refusal that retrying alone does not change.
            replaces: a registered base with the same id and another geometry is replaced.
        """
        self._registry = registry
        self._replaces = replaces
        self._on_clash = on_clash
        self._pending: dict[str, worker_pb2.GetModelResponse] = {}
        self._wanted = asyncio.Event()
        self._refusals: dict[str, str] = {}
        """Why pending bases were refused last, by id."""

    @property
    def missing(self) -> str:
        """Why bases are not registered; "" when all are."""
        refusals = "; ".join(self._refusals.values())
        return (refusals or "the bases are not registered yet") if self._pending else ""

    def seen(self, model: worker_pb2.GetModelResponse) -> None:
        """A base appeared, or came back with another model."""
        self._pending[model.base_id] = model
        self._wanted.set()

    async def run(self) -> None:
        """Register pending bases until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for model in list(self._pending.values()):
                await self._register(model)
            if self._pending:
                await asyncio.sleep(_RETRY_S)
                self._wanted.set()

    async def _register(self, model: worker_pb2.GetModelResponse) -> None:
        base_id = model.base_id
        base = registry_pb2.Base(
            base_id=base_id,
            geometry=model.geometry,
            max_lora_rank=model.max_lora_rank,
            aliases=model.base_aliases,
        )
        try:
            await self._registry.register_base(base, replace=self._replaces)
        except LoraplexError as error:
            refusal = f"the registry refuses base {base_id!r}: {error.message}"
            if refusal != self._refusals.get(base_id):
                logger.warning("base not registered", extra={"base": base_id, "why": error.message})
            self._refusals[base_id] = refusal
            if isinstance(error, AlreadyExists | InvalidRequest):
                self._on_clash(type(error)(f"{refusal} ({_WAY_OUT})"))
            return
        self._refusals.pop(base_id, None)
        if self._pending.get(base_id) is model:
            del self._pending[base_id]
