"""Packs a verified adapter folder into its image. Without torch, so that packing processes stay
small.

Values that depend on the base's weights (DoRA's gains, differences from the base) come from
`BaseValues`, which only the engine process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loraplex.adapter_format.config import AdapterConfig
from loraplex.adapter_format.geometry import Geometry
from loraplex.adapter_format.report import AdapterModule, ExpertShare, Report
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex.adapter_format.tasks import SEQ_CLS
from loraplex_services.worker.adapters.pack.contents import AdapterReader
from loraplex_services.worker.adapters.pack.image import PackedAdapter, image_path
from loraplex_services.worker.adapters.pack.image_builder import ImageBuilder, Integers
from loraplex_services.worker.adapters.pack.site_plan import (
    ItemBytes,
    Part,
    Role,
    SitePlan,
    plan_sites,
)
from loraplex_services.worker.adapters.pack.values import (
    Read,
    TensorFile,
    Values,
    check_finite,
    itemsize,
)
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.own_rope import BaseRopes, own_ropes, switch_len_of
from loraplex_services.worker.types.sites import EMBEDDING, HEAD


class NeedsBase(Exception):
    """The adapter's image depends on the base's weights."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows of a site's weight that replace the base's."""

    row_ids: tuple[int, ...]
    """Ascending; of an embedding or head, token ids."""
    rows: Values
    """`[len(row_ids), width]`."""


class BaseValues(Protocol):
    """Computes values that depend on an adapter and on the base."""

    def changed_rows(self, module: AdapterModule, read: Read) -> ChangedRows | None:
        """The rows of a weight that the module replaces; None if there are none."""
        ...

    def value(self, part: Part, site_id: int, read: Read) -> Values:
        """`[1, out]` of a part that is neither plain nor rows."""
        ...


@dataclass(frozen=True, slots=True)
class _Packed:
    """How an adapter was packed."""

    report: Report
    fingerprints: tuple[str, ...]
    plans: list[SitePlan]
    images: list[ImageBuilder]


class Packer:
    """Packs adapters for one layout. Without `base`, only what does not depend on it."""

    def __init__(
        self, geometry: Geometry, layout: AdapterLayout, base: BaseValues | None = None
    ) -> None:
        self._reader = AdapterReader(geometry, layout.sites, layout.max_rank)
        self.layout = layout
        self._base = base
        self.fingerprint = layout.fingerprint
        self._ranks = layout.ranks
        self.fingerprints = tuple(own.fingerprint for own in self._ranks)
        """Fingerprints of the images of all ranks."""
        self._last: _Packed | None = None
        """The last adapter. Versions of one training run are packed in the same way."""

    def pack(self, folder: Path) -> PackedAdapter:
        """Validate the adapter and lay out its bytes for the layout's rank.

        Raises:
            InvalidAdapter: not for this base, over the rank limit, or not finite.
            NeedsBase: there is no `base` and the adapter needs it.
        """
        [image] = self._pack(folder, [(self.layout, self.fingerprint)])
        return image

    def write(self, folder: Path) -> int:
        """Write the images of all ranks into the adapter's folder.

        Returns the pages of the largest image: every rank gives an adapter the same pages.
        """
        images = self._pack(folder, list(zip(self._ranks, self.fingerprints, strict=True)))
        for image, fingerprint in zip(images, self.fingerprints, strict=True):
            image.write(image_path(folder, fingerprint))
        return max(image.index.num_pages for image in images)

    def _pack(
        self, folder: Path, layouts: Sequence[tuple[AdapterLayout, str]]
    ) -> list[PackedAdapter]:
        """An image for each of the layouts, which come with their fingerprints; what the base
        decides is computed once."""
        report = self._reader.read(folder)
        modules = report.modules
        if self._base is None and any(_needs_base(m) for m in modules if not self._is_head(m)):
            raise NeedsBase
        file = TensorFile(folder)
        changed = self._changed(modules, file.read)
        row_ids = {name: rows.row_ids for name, rows in changed.items()}
        packed = self._planned(report, layouts, row_ids)
        for plan in packed.plans:
            for part in plan.parts:
                takers = [image for image in packed.images if image.wants(plan, part)]
                if takers:
                    value = self._packed(part, plan.site_id, changed, file.read)
                    for image in takers:
                        image.put(plan, part, value)
        facts = _facts_of(packed.plans, report.config, self.layout.ropes)
        images = [image.build(facts) for image in packed.images]
        self._last = None if row_ids or self.layout.int8 else packed
        return images

    def _planned(
        self,
        report: Report,
        layouts: Sequence[tuple[AdapterLayout, str]],
        row_ids: dict[str, tuple[int, ...]],
    ) -> _Packed:
        """The plan of the last adapter, if it has the same description and no rows are replaced."""
        fingerprints, last = tuple(fingerprint for _, fingerprint in layouts), self._last
        if last is not None and last.report is report and not row_ids:
            if last.fingerprints == fingerprints:
                return replace(last, images=[image.again() for image in last.images])
        sizes = ItemBytes(self._lora_bytes, itemsize(self.layout.dtype))
        plans = plan_sites(report.modules, self.layout.sites, sizes, row_ids)
        images = [ImageBuilder(plans, *layout, row_ids) for layout in layouts]
        return _Packed(report, fingerprints, plans, images)

    def _lora_bytes(self, info: TensorInfo, site_kind: str) -> int:
        return itemsize(self.layout.lora_dtype(info.dtype, site_kind))

    def _changed(self, modules: Sequence[AdapterModule], read: Read) -> dict[str, ChangedRows]:
        found: dict[str, ChangedRows] = {}
        for module in modules:
            if self._is_head(module):
                rows: ChangedRows | None = _head_rows(module, read)
            else:
                rows = self._base.changed_rows(module, read) if self._base else None
            if rows is not None:
                found[module.name] = rows
        return found

    def _is_head(self, module: AdapterModule) -> bool:
        sites = self.layout.sites
        return sites.sites[sites.modules[module.name].site_id].kind == HEAD

    def _packed(
        self, part: Part, site_id: int, changed: dict[str, ChangedRows], read: Read
    ) -> Values | Integers:
        """The whole value of a part, in the type that it is packed in."""
        if part.role is Role.ROWS:
            return changed[part.module.name].rows.to(self.layout.dtype)
        value = self._value(part, site_id, read)
        if part.matrix.itemsize == itemsize("I8"):
            return Integers(*value.to_int8())
        return value

    def _value(self, part: Part, site_id: int, read: Read) -> Values:
        """The matrix to be packed, in its packed type unless that is an integer."""
        module, kind = part.module, self.layout.sites.sites[site_id].kind
        if part.role in (Role.A, Role.B):
            value = self._matrix(part, kind, read)
            is_transposed = part.role is Role.B or kind == EMBEDDING
            return Values(value.data.T, value.dtype) if is_transposed else value
        if part.role is Role.LORA_BIAS:
            assert module.lora_bias is not None, "the plan asked for it"
            bias = read(module.lora_bias).to("F32").data
            return Values(bias[None] * np.float32(module.scale), "F32")
        assert self._base is not None, "asked before"
        return self._base.value(part, site_id, read)

    def _matrix(self, part: Part, site_kind: str, read: Read) -> Values:
        """A or B as published, in its packed type unless that is an integer."""
        module, is_a = part.module, part.role is Role.A
        info = (module.embedding_a or module.a) if is_a else (module.embedding_b or module.b)
        assert info is not None, "the plan asked for it"
        value = read(info)
        if module.expert is not None:  # of many, each of which converts its own share
            value = Values(_of_expert(value.data, module.expert, is_a), value.dtype)
        if (dtype := self.layout.lora_dtype(info.dtype, site_kind)) != "I8":
            value = value.to(dtype)
        if value.dtype != info.dtype:
            check_finite(value, info.name)
        return value


_ALONE = {
    Role.GAIN: "uses DoRA",
    Role.BIAS: "trains biases",
    Role.NORM: "trains norms",
    Role.ROWS: "replaces weights of the base",
}
"""Why an adapter with such a part cannot be combined with others."""


def _head_rows(module: AdapterModule, read: Read) -> ChangedRows:
    """All rows of a head, which no base has."""
    assert module.full is not None, "a head is its weight"
    weight = read(module.full)
    return ChangedRows(tuple(range(len(weight.data))), weight)


def _facts_of(plans: Sequence[SitePlan], config: AdapterConfig, ropes: BaseRopes) -> AdapterFacts:
    """Raises InvalidAdapter for a rotary embedding that the base cannot have."""
    roles = {part.role for plan in plans for part in plan.parts}
    reasons = [why for role, why in _ALONE.items() if role in roles]
    vocab_size = max((plan.num_rows for plan in plans), default=0)
    if vocab_size:
        reasons.insert(0, "has a vocabulary of its own")
    if config.task == SEQ_CLS:
        reasons.insert(0, "has a classification head")
    scaling = config.rope_scaling
    if scaling is not None:
        reasons.insert(0, "has a rope scaling of its own")
    if config.alora_invocation_tokens:
        reasons.insert(0, "is an activated LoRA")
    return AdapterFacts(
        vocab_size=vocab_size,
        invocation_tokens=list(config.alora_invocation_tokens or ()),
        alone_because=reasons[0] if reasons else "",
        has_gain=Role.GAIN in roles,
        task=config.task,
        eos_token_ids=list(config.eos_token_ids),
        rope_scaling=scaling.to_json() if scaling else "",
        context_tokens=scaling.context_tokens(ropes.max_position_embeddings) if scaling else 0,
        rope_switch_len=switch_len_of(own_ropes(ropes, scaling)) if scaling else None,
    )


def _needs_base(module: AdapterModule) -> bool:
    """Whether any of the module's parts is not plain."""
    return any(
        tensor is not None
        for tensor in (
            module.magnitude,
            module.token_delta,
            module.full,
            module.base_copy,
            module.bias,
        )
    )


def _of_expert(stacked: NDArray[Any], share: ExpertShare, is_a: bool) -> NDArray[Any]:
    """Its rows of A `[experts * rank, in]`, or its columns of B `[out, rank * experts]`, in which
    experts alternate."""
    if not is_a:
        return stacked[:, share.index :: share.num_experts]
    rank = len(stacked) // share.num_experts
    return stacked[share.index * rank : (share.index + 1) * rank]
