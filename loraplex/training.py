"""Publishes adapters from training loops: a callback for `transformers.Trainer` and its subclasses.

trainer = SFTTrainer(..., callbacks=[PublishCallback(Publication("policy", keep_versions=4))])
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from loraplex.client.blocking import BlockingRegistry
from loraplex.client.publishing import Publication
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError

logger = logging.getLogger(__name__)

STEP_LABEL = "training-step"


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the adapter at each save of a Trainer.

    A publication that fails is logged, and training continues, unless `must_succeed`.
    """

    def __init__(
        self,
        publication: Publication,
        registry: str | None = None,
        credentials: Credentials | None = None,
        *,
        must_succeed: bool = False,
    ) -> None:
        """`registry` and `credentials` are those of `RegistryClient`."""
        self._publication = publication
        self._registry = registry
        self._credentials = credentials
        self._must_succeed = must_succeed

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer after it has saved a checkpoint."""
        if state.is_world_process_zero:
            self._publish(Path(args.output_dir) / f"checkpoint-{state.global_step}", state)

    def _publish(self, folder: Path, state: Any) -> None:
        labels = {**self._publication.labels, STEP_LABEL: str(state.global_step)}
        publication = dataclasses.replace(self._publication, labels=labels)
        try:
            with BlockingRegistry(self._registry, self._credentials) as registry:
                published = registry.upload(folder, publication)
        except LoraplexError as error:
            if self._must_succeed:
                raise
            logger.warning("checkpoint %s was not published: %s", folder.name, error.message)
        else:
            logger.info("published %s as %s", folder.name, published.version.ref)
