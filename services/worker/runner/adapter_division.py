"""How the ranks of a worker divide adapters: from its settings to the choice for each site."""

from __future__ import annotations

import logging

import torch

from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.division import COSTS, Division
from loraplex_services.worker.types.runner_settings import RunnerSettings

logger = logging.getLogger(__name__)

_ITEM_BYTES = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an item by the setting `lora_dtype`. Other values mean the model's dtype."""


def division_of(
    settings: RunnerSettings, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> Division:
    """The facts that decide the choice for each site. Ranks of several machines divide one matrix
    unless the settings say otherwise, because what their link costs is not known."""
    size = ranks.shard.size
    return Division(
        size,
        settings.fully_sharded_loras,
        COSTS[device.type] if ranks.num_local == size else None,
        _ITEM_BYTES.get(settings.lora_dtype, dtype.itemsize),
        settings.max_lora_rank,
        settings.max_num_seqs,
        settings.max_resident,
    )


def log_division(layout: AdapterLayout) -> None:
    """Say which modules have both matrices divided among ranks, if there are several."""
    sites, size = layout.sites.sites, layout.shard.size
    if size == 1 or layout.shard.rank:
        return
    cut = [site for site in sites if site.cut.outputs or site.cut.inputs]
    both = {site.id for site in cut if site.divides_both}
    names = sorted(
        {
            name.rpartition(".")[2]
            for name, part in layout.sites.modules.items()
            if part.site_id in both
        }
    )
    logger.info(
        "adapters are divided among %d ranks: both matrices at %d of %d sites (%s), one at the "
        "others",
        *(size, len(both), len(cut), " ".join(names) or "none"),
    )
