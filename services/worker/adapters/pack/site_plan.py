"""Plans the updates of an adapter at each site, and the order in which they are packed. Shapes
only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex_services.worker.adapters.pack.tiles import Matrix
from loraplex_services.worker.types.sharding import Span
from loraplex_services.worker.types.sites import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    Site,
    SiteRange,
    SiteTable,
    Slice,
)

FLOAT32_BYTES = 4


class Role(enum.Enum):
    """The purpose of a packed matrix. Rows are in the model's dtype, vectors in float32."""

    A = "a"
    """`[rank, in]`; at the embedding `[vocabulary, rank]`, so that a token finds its row."""
    B = "b"
    """`[rank, out]`: rank rows."""
    LORA_BIAS = "lora_bias"
    """`[1, out]`: bias of B times the module's scale."""
    GAIN = "gain"
    """`[1, out]`: DoRA."""
    BIAS = "bias"
    """`[1, out]`: trained bias minus the base's."""
    NORM = "norm"
    """`[1, width]`: a norm's weight that replaces the base's."""
    ROWS = "rows"
    """`[changed, width]`: rows of a weight that replace the base's; of the embedding, the head, or
    a whole linear."""


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix to pack, and its position in the site's matrix of that role."""

    module: AdapterModule
    role: Role
    row_begin: int
    col_begin: int
    matrix: Matrix
    columns: tuple[Span, ...] | None = None
    """Columns of the whole value that a tensor-parallel rank has; None = all."""
    rows: tuple[int, ...] | None = None
    """Rows of it; None = all."""


@dataclass(frozen=True, slots=True)
class ItemBytes:
    """Bytes of one element as packed."""

    lora: Callable[[TensorInfo, str], int]
    """Bytes per element of A and B, by the published tensor and the kind of site."""
    rows: int


@dataclass(frozen=True, slots=True)
class SitePlan:
    """An adapter at one site; parts in packing order: all A, all B, then vectors."""

    site_id: int
    slices: tuple[Slice, ...]
    parts: tuple[Part, ...]
    num_rows: int = 0
    """Tokens of the adapter's own table, where they are not as many as the base's."""


def plan_sites(
    modules: Sequence[AdapterModule],
    table: SiteTable,
    sizes: ItemBytes,
    changed: Mapping[str, tuple[int, ...]],
) -> list[SitePlan]:
    """Group an adapter's modules by site, in site order, so layer-major.

    Args:
        sizes: of elements of A, B and rows.
        changed: by module, which rows of its weight the adapter replaces, ascending.
    """
    by_site: dict[int, list[tuple[SiteRange, AdapterModule]]] = {}
    for module in modules:
        site_range = table.modules[module.name]
        by_site.setdefault(site_range.site_id, []).append((site_range, module))
    return [
        _plan_site(
            table.sites[site_id],
            sorted(pairs, key=lambda pair: pair[0].out_begin),
            sizes,
            changed,
        )
        for site_id, pairs in sorted(by_site.items())
    ]


def _plan_site(
    site: Site,
    modules: Sequence[tuple[SiteRange, AdapterModule]],
    sizes: ItemBytes,
    changed: Mapping[str, tuple[int, ...]],
) -> SitePlan:
    slices: list[Slice] = []
    by_role: dict[Role, list[Part]] = {role: [] for role in Role}
    rank = num_replaced = 0
    for site_range, module in modules:
        if module.rank:
            outs = site_range.out_begin, _outputs(site, site_range, module)
            slices.append(Slice(rank, module.rank, *outs, module.scale))
        lora = _lora_parts(site, site_range, module, rank, sizes.lora)
        rows = _row_parts(site, module, sizes.rows, num_replaced, changed.get(module.name, ()))
        num_replaced += len(changed.get(module.name, ()))
        for part in (*lora, *_vector_parts(site, site_range, module), *rows):
            by_role[part.role].append(part)
        rank += module.rank
    parts = tuple(part for role in Role for part in by_role[role])
    num_rows = max(module.num_rows for _, module in modules)
    return SitePlan(site.id, tuple(slices), parts, num_rows)


def _lora_parts(
    site: Site,
    site_range: SiteRange,
    module: AdapterModule,
    rank: int,
    item_bytes: Callable[[TensorInfo, str], int],
) -> Iterator[Part]:
    a, b = module.embedding_a or module.a, module.embedding_b or module.b
    if a is None or b is None:
        return
    if site.kind == EMBEDDING:
        num_tokens = module.num_rows or site.in_features
        matrix = Matrix(num_tokens, module.rank, item_bytes(a, site.kind))
        yield Part(module, Role.A, 0, rank, matrix)
    else:
        matrix = Matrix(module.rank, site.in_features, item_bytes(a, site.kind))
        yield Part(module, Role.A, rank, 0, matrix)
    matrix = Matrix(module.rank, _outputs(site, site_range, module), item_bytes(b, site.kind))
    yield Part(module, Role.B, rank, site_range.out_begin, matrix)


def _vector_parts(site: Site, site_range: SiteRange, module: AdapterModule) -> Iterator[Part]:
    vectors = (
        (Role.LORA_BIAS, module.lora_bias),
        (Role.GAIN, module.magnitude),
        (Role.BIAS, module.bias),
        (Role.NORM, module.full if site.kind == NORM else None),
    )
    for role, tensor in vectors:
        if tensor is not None:
            vector = Matrix(1, _outputs(site, site_range, module), FLOAT32_BYTES)
            yield Part(module, role, 0, site_range.out_begin, vector)


def _outputs(site: Site, site_range: SiteRange, module: AdapterModule) -> int:
    """Outputs of the adapter's module: at the head, tokens."""
    return (site.kind == LM_HEAD and module.num_rows) or site_range.out_features


def _row_parts(
    site: Site, module: AdapterModule, itemsize: int, begin: int, row_ids: tuple[int, ...]
) -> Iterator[Part]:
    """`begin` rows of the site are replaced by modules before this one."""
    if row_ids:
        width = site.out_features if site.kind == EMBEDDING else site.in_features
        yield Part(module, Role.ROWS, begin, 0, Matrix(len(row_ids), width, itemsize))
