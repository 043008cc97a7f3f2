"""The model types of bases that workers of this version serve.

Whoever registers a base by its folder has no model code to ask. The lists are therefore kept here,
and a test compares them with that code.
"""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.errors import InvalidRequest

NATIVE_TYPES = frozenset(
    """
    gemma2 gemma3_text gemma4_text gemma4_unified_text gpt_oss llama ministral3 mistral mixtral phi3
    qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    """.split()
)
"""Text models with model code here."""

LIBRARY_TYPES = frozenset(
    """
    afmoe apertus arcee axk1 cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 dots1
    ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma glm glm4 glm4_moe
    glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 kolibri1 llama4_text longcat_flash mellum mimo_v2_flash minicpm3
    minimax_m2 ministral nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phimoe
    seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
    """.split()
)
"""Text models that are compared with PEFT through the transformers library."""

TIED_TYPES = frozenset(
    """
    cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe falcon gemma gemma2 gemma3_text gemma4_text
    gemma4_unified_text gpt2 gpt_bigcode granite_swa minicpm3 opt smollm3 starcoder2 vaultgemma
    youtu
    """.split()
)
"""Types of these whose head is the embedding if config.json lacks `tie_word_embeddings`. Files may
hold a copy of the table for the head."""


def check_served_type(model_type: str, modules: Iterable[str]) -> None:
    """Refuse a base whose text model may be of a type that no worker serves.

    Args:
        modules: names of its modules.

    Raises:
        InvalidRequest: naming the type or a module.
    """
    if model_type not in NATIVE_TYPES | LIBRARY_TYPES:
        known = ", ".join(sorted(NATIVE_TYPES | LIBRARY_TYPES))
        why = (
            f"is not known to be served; known: {known}. If the transformers library runs it, "
            "start a worker with the base: its gateway registers it"
        )
        raise InvalidRequest.field("config.json:model_type", model_type, why)
    recurrent = next((name for name in modules if ".mamba." in name), None)
    if recurrent is not None:
        why = "is a part of a recurrent layer, which no worker serves in bases of this type"
        raise InvalidRequest.field(recurrent, model_type, why)
