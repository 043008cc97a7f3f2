"""Facts about an adapter that a request needs before it runs. No torch."""

from __future__ import annotations

import msgspec

from loraplex.adapter_format.tasks import CAUSAL_LM


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts that its image tells; the defaults are those of a plain LoRA."""

    vocab_size: int = 0
    """Tokens of its own embedding and head; 0 = the base's."""
    invocation_tokens: list[int] = []
    """Activated LoRA: it acts from the last occurrence of these tokens in the prompt on."""
    alone_because: str = ""
    """What of it cannot be added to another adapter's; "" = nothing."""
    has_gain: bool = False
    """DoRA: its gains are for weight 1."""
    eos_token_ids: list[int] = []
    """Tokens that end its output; none = the base's."""
    rope_scaling: str = ""
    """JSON of its own `RopeScaling`; "" = the base's rotary embedding."""
    context_tokens: int = 0
    """Prompt and output together under its own rotary embedding; 0 = the base's."""
    rope_switch_len: int | None = None
    """See `own_rope.switch_len_of`, of its own."""
    task: str = CAUSAL_LM
    """What it was trained for: others than this one do not generate."""
