"""Loads adapters into a runner at once, without the engine.

They are packed in memory, so that nothing is written next to the adapter. Ranks that share a base
read each an image of their own, which has to lie there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.runner.runner import TorchRunner


def adapter_blocks(runner: TorchRunner, folder: Path) -> int:
    """Blocks that the adapter in a folder needs."""
    if runner._followers is not None:
        return runner.pack_adapter(folder).result()
    return runner._adapters._packer.pack(folder).index.num_blocks


@torch.inference_mode()
def load_adapter(runner: TorchRunner, slot: int, folder: Path, blocks: Sequence[int]) -> None:
    """Enter the adapter in a folder under `slot`, in `blocks`. Raises as packing does."""
    if runner._followers is not None:
        runner.enter_adapter(slot, runner.copy_adapter(folder, blocks).result())
        return
    image = runner._adapters._packer.pack(folder)
    runner._adapters.weights.copy(image, blocks)
    runner.enter_adapter(slot, CopiedImage(folder, image.index, tuple(blocks), 0.0))
