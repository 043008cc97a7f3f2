"""Facts about an adapter that a request needs before it runs. No torch."""

from __future__ import annotations

import msgspec

from loraplex.adapter_format.tasks import CAUSAL_LM


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about an adapter that its image contains. The defaults are those of a plain LoRA."""

    vocab_size: int = 0
    """Number of tokens in its own embedding and head; 0 = the base's."""
    invocation_tokens: list[int] = []
    """Activated LoRA: the adapter acts from the last occurrence of these tokens in the prompt
    on."""
    alone_because: str = ""
    """The feature that keeps it from being combined with another adapter; "" = none."""
    has_gain: bool = False
    """Whether it is DoRA, whose gains are only right for a coefficient of 1."""
    eos_token_ids: list[int] = []
    """Token ids that end its output; empty = the base's."""
    rope_scaling: str = ""
    """JSON of its own `RopeScaling`; "" = the base's rotary embedding."""
    context_tokens: int = 0
    """Context in tokens, prompt and output together, under its own rotary embedding; 0 = the
    base's."""
    rope_switch_len: int | None = None
    """`own_rope.switch_len_of` its own rotary embedding."""
    task: str = CAUSAL_LM
    """The task it was trained for. Only adapters with this default generate."""
