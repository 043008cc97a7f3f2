"""How much of the arena adapters may hold: one of them, the pinned ones, and all together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraplex.errors import ResourceExhausted


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits in arena blocks. Refusals name the setting that raises them."""

    max_resident: int
    """Adapters on the device. Half of them may be pinned."""
    max_adapter_blocks: int
    """Blocks of one adapter."""
    max_pinned_blocks: int
    """Blocks of all pinned adapters."""
    max_blocks: float = math.inf
    """Blocks of all adapters on the device."""

    def check_size(self, digest: str, num_blocks: float) -> None:
        """Raises ResourceExhausted if one adapter is too large."""
        most = min(self.max_adapter_blocks, self.max_blocks)
        if num_blocks > most:
            setting = "KV_MEMORY" if most == self.max_adapter_blocks else "LORA_MEMORY"
            raise ResourceExhausted(
                f"adapter {digest} needs {math.ceil(num_blocks)} arena blocks, but one adapter may "
                f"hold at most {most}: lower its rank or raise LORAPLEX_{setting}",
                reason="ADAPTER_TOO_LARGE",
            )

    def check_pins(self, digest: str, num_pinned: int, num_blocks: int) -> None:
        """Raises ResourceExhausted if this many adapters and blocks, including the adapter
        `digest`, must not be pinned."""
        max_pinned = self.max_resident // 2
        if num_blocks > self.max_pinned_blocks or num_pinned > max_pinned:
            raise ResourceExhausted(
                f"pinning {digest} would pin {num_pinned} adapters with {num_blocks} arena "
                f"blocks; pins may hold {max_pinned} adapters with "
                f"{self.max_pinned_blocks} blocks: unpin another one first",
                reason="PIN_LIMIT",
            )

    def beyond_share(self, num_blocks: float, pinned_blocks: int) -> ResourceExhausted | None:
        """Why adapters of `num_blocks` could never be on the device together with the pinned ones;
        None if they could."""
        if num_blocks + pinned_blocks <= self.max_blocks:
            return None
        return ResourceExhausted(
            f"the adapters of the request need {math.ceil(num_blocks)} arena blocks, but all "
            f"adapters may hold {self.max_blocks}, of which {pinned_blocks} are pinned: unpin "
            "adapters, or raise LORAPLEX_LORA_MEMORY",
            reason="REQUEST_TOO_LARGE",
        )
