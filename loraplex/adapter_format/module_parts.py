"""Checks which tensors of one module may occur together, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.adapter_format.config import THE_EMBEDDING, AdapterConfig
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import (
    EMBEDDING,
    HEAD,
    LINEAR,
    LM_HEAD,
    NORM,
    Module,
    kind_of_matrix,
)
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo
from loraplex.adapter_format.tensor_names import (
    BASE_BIAS,
    BASE_WEIGHT,
    BIAS,
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_BIAS,
    MAGNITUDE,
    ORIGINAL,
    ORIGINAL_BIAS,
    SAVED_BIAS,
    SAVED_COPY,
    TOKEN_DELTA,
    WEIGHT,
    A,
    B,
)

_PAIRS = ((A, B), (B, A), (EMBEDDING_A, EMBEDDING_B), (EMBEDDING_B, EMBEDDING_A))
_WORDS = {
    A: "lora_A",
    B: "lora_B",
    EMBEDDING_A: "lora_embedding_A",
    EMBEDDING_B: "lora_embedding_B",
}


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """The tensors of one module, and what the base and the config say about it."""

    module: Module
    tensors: dict[str, TensorInfo]
    """The module's tensors by part, as `tensor_names` calls the parts."""
    config: AdapterConfig

    @property
    def has_lora(self) -> bool:
        """Whether any LoRA matrix is there."""
        return any(part in self.tensors for part, _ in _PAIRS)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens whose rows were trained, in the order of the rows."""
        by_module = dict(self.config.trainable_token_indices)
        matches = (ids for suffix, ids in by_module.items() if _trains(self.module.name, suffix))
        return next(matches, ())

    def check(self, findings: Findings) -> bool:
        """Refuse parts that do not belong. Returns whether there were none."""
        before = len(findings.refusals)
        self._check_pairs(findings)
        self._check_dora(findings)
        for part, info in self.tensors.items():
            problem = self._problem(part)
            if problem:
                findings.refuse(f"{TENSOR_FILE}:{info.name}", info.name, problem)
        return len(findings.refusals) == before

    def _check_pairs(self, findings: Findings) -> None:
        for part, other in _PAIRS:
            if part in self.tensors and other not in self.tensors:
                name = self.tensors[part].name
                hint = f"has no {_WORDS[other]}; save the adapter again"
                findings.refuse(f"{TENSOR_FILE}:{name}", name, hint)

    def _check_dora(self, findings: Findings) -> None:
        """Refuse a module that lacks what `use_dora` or `lora_bias` promises."""
        for is_on, part, word in (
            (self.config.use_dora, MAGNITUDE, "lora_magnitude_vector although use_dora"),
            (self.config.lora_bias and A in self.tensors, LORA_BIAS, "bias although lora_bias"),
        ):
            first = self.tensors.get(A) or self.tensors.get(EMBEDDING_A)
            if is_on and first and part not in self.tensors:
                hint = f"has no {word} is true; save the adapter again"
                findings.refuse(f"{TENSOR_FILE}:{first.name}", first.name, hint)

    def _problem(self, part: str) -> str | None:
        """Why a part does not belong here; None if it does."""
        kind, config = self.module.kind, self.config
        if kind == HEAD and part != WEIGHT:
            return "is not the whole weight of a head, which is all that PEFT saves of one"
        if part in (A, B) and kind not in (LINEAR, LM_HEAD):
            return f"is LoRA of a linear on {_with_article(kind)}; correct target_modules"
        if part in (EMBEDDING_A, EMBEDDING_B) and kind != EMBEDDING:
            return f"is LoRA of an embedding on {_with_article(kind)}; correct target_modules"
        if part == MAGNITUDE and not config.use_dora:
            return "is a DoRA magnitude but use_dora is false; correct adapter_config.json"
        if part == LORA_BIAS and not config.lora_bias:
            return "is a bias of lora_B but lora_bias is false; correct adapter_config.json"
        if part in (SAVED_BIAS, ORIGINAL_BIAS) and not self._saves_bias_twice:
            return "is a copy, which PEFT adds for biases in modules_to_save; remove it"
        if part in (BIAS, BASE_BIAS):
            return self._bias_problem(part)
        is_table = kind in (EMBEDDING, LM_HEAD)
        trains_rows = self.has_lora or TOKEN_DELTA in self.tensors
        if part == BASE_WEIGHT and not (is_table and trains_rows):
            return "is a copy of the base, which PEFT adds when LoRA is on embeddings; remove it"
        if part in (SAVED_COPY, ORIGINAL) and not (is_table and self._has_saved_weight):
            return "is a copy, which PEFT adds when modules_to_save has embeddings; remove it"
        if part == WEIGHT and not (is_table or saves(config, self.module.name)):
            return "is a whole weight but not in modules_to_save; correct adapter_config.json"
        if part == TOKEN_DELTA and not self.token_ids:
            return "has no entry in trainable_token_indices; correct adapter_config.json"
        return None

    @property
    def _has_saved_weight(self) -> bool:
        """Whether a table is saved whole, itself or with the one it is tied to."""
        is_saved = self.config.ensure_weight_tying or saves(self.config, self.module.name)
        return WEIGHT in self.tensors and is_saved

    @property
    def _saves_bias_twice(self) -> bool:
        """Whether PEFT writes a bias as one that it trains, and again as a part of a saved
        module."""
        is_saved = saves(self.config, self.module.name)
        return BIAS in self.tensors and is_saved and self.config.bias == "all"

    def _bias_problem(self, part: str) -> str | None:
        if not self.module.has_bias:
            return "is a bias, but the base has none here; is this the right base?"
        if part == BIAS and (self.config.bias == "all" or saves(self.config, self.module.name)):
            return None
        is_copy = self.module.kind == LM_HEAD  # PEFT saves the head that it adapts, bias and all
        if part == BASE_BIAS and (is_copy or self.config.bias != "none"):
            return None
        if part == BIAS and self.config.bias == "lora_only" and self.has_lora:
            return (
                "is named as PEFT before 0.7 named it, and newer ones ignore it; set bias to "
                '"all" in adapter_config.json to use it, or remove it'
            )
        return f'is a trained bias, but bias is "{self.config.bias}"; correct adapter_config.json'

    def check_shapes(self, rank: int, findings: Findings) -> None:
        """Refuse tensors whose shape is not the one that rank and base determine."""
        expected = self._shapes(rank)
        module = self.module
        for part, info in self.tensors.items():
            if module.kind == HEAD and info.shape != expected[part]:
                why = f"must be [labels, {module.in_features}], a row for each label"
                findings.refuse(f"{TENSOR_FILE}:{info.name}", list(info.shape), why)
            elif info.shape != expected[part]:
                wanted = expected[part]
                sizes = zip(info.shape, wanted, strict=False)
                fits = len(info.shape) == len(wanted) and all(g == w or w == rank for g, w in sizes)
                (findings.refuse if fits else findings.misfit)(
                    f"{TENSOR_FILE}:{info.name}",
                    list(info.shape),
                    f"must be {list(wanted)} on this base, for rank {rank} (r, or the first "
                    "matching key of rank_pattern)" + "; correct adapter_config.json" * fits,
                )

    def _shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The right shape of every part. Embeddings and heads may have more rows than the base."""
        kind, inputs, outputs = self.module.kind, self.module.in_features, self.module.out_features
        if kind == EMBEDDING:
            inputs = self._num_rows(inputs)
        elif kind == LM_HEAD:
            outputs = self._num_rows(outputs)
        matrix = (inputs, outputs) if kind == EMBEDDING else (outputs, inputs)
        weight = (outputs,) if kind == NORM else matrix
        return {
            A: (rank, inputs),
            B: (outputs, rank),
            EMBEDDING_A: (rank, inputs),
            EMBEDDING_B: (outputs, rank),
            MAGNITUDE: (outputs,),
            LORA_BIAS: (outputs,),
            BIAS: (outputs,),
            BASE_BIAS: (outputs,),
            SAVED_BIAS: (outputs,),
            ORIGINAL_BIAS: (outputs,),
            WEIGHT: weight,
            BASE_WEIGHT: weight,
            SAVED_COPY: weight,
            ORIGINAL: weight,
            TOKEN_DELTA: (len(self.token_ids), outputs if kind == EMBEDDING else inputs),
        }

    def _num_rows(self, base_rows: int) -> int:
        """Number of rows of the table: those of a stored copy if there is one."""
        info = self.tensors.get(WEIGHT) or self.tensors.get(BASE_WEIGHT)
        return info.shape[0] if info and info.shape else base_rows


def saves(config: AdapterConfig, name: str) -> bool:
    """Whether `modules_to_save` names a module, or one that it is a part of. PEFT compares the
    ends of names as text."""
    if not config.modules_to_save:
        return False
    ends = [i for i, char in enumerate(name) if char == "."]
    return any(name[:end].endswith(config.modules_to_save) for end in (*ends, len(name)))


def trains_tokens(config: AdapterConfig, name: str) -> bool:
    """Whether `trainable_token_indices` names a module."""
    return any(_trains(name, suffix) for suffix, _ in config.trainable_token_indices)


def _trains(name: str, suffix: str) -> bool:
    is_named = name == suffix or name.endswith(f".{suffix}")
    return is_named or (suffix == THE_EMBEDDING and kind_of_matrix(name) == EMBEDDING)


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
