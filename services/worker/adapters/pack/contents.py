"""Checks the contents of a verified adapter folder against the base. Reads headers only."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from loraplex.adapter_format.config import CONFIG_FILE
from loraplex.adapter_format.geometry import Geometry, Module, geometry_from_folder
from loraplex.adapter_format.modules import CANNOT_ADAPT
from loraplex.adapter_format.report import Report
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, read_prefix
from loraplex.adapter_format.validate import validate
from loraplex.errors import InvalidAdapter, Violation
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.sites import HEAD, SiteTable

_KEPT, _SMALL_BYTES = 4, 256 << 10
"""Descriptions that are kept, and the largest config and header of an adapter with one."""


class AdapterReader:
    """Checks adapters for one base."""

    def __init__(self, geometry: Geometry, sites: SiteTable, max_rank: int) -> None:
        self._geometry = geometry
        self._sites = sites
        self._max_rank = max_rank
        # Versions of one training run have the same config and header.
        self._report = lru_cache(_KEPT)(self._validated)

    def read(self, folder: Path) -> Report:
        """The result of validation: the modules that the adapter changes, each of which is in the
        base.

        Raises:
            InvalidAdapter: with every violation found.
        """
        tensor_file = folder / TENSOR_FILE
        config, prefix = (folder / CONFIG_FILE).read_bytes(), read_prefix(tensor_file)
        is_small = len(config) + len(prefix) <= _SMALL_BYTES
        report_of = self._report if is_small else self._validated
        return report_of(config, prefix, tensor_file.stat().st_size)

    def _validated(self, config: bytes, prefix: bytes, tensor_file_size: int) -> Report:
        report = validate(
            config,
            prefix,
            tensor_file_size,
            files=(),
            geometry=self._geometry,
            max_rank=self._max_rank,
            allow_missing=True,
        )
        unknown = [m.name for m in report.modules if m.name not in self._sites.modules]
        if unknown:
            raise InvalidAdapter.of(
                [Violation.of(f"{TENSOR_FILE}:{n}", n, CANNOT_ADAPT) for n in unknown]
            )
        return report


def weights_key(folder: Path, geometry: Geometry, quantization: str) -> str:
    """Changes with the base's weights: by name, size and time of its files, not by their bytes.

    Args:
        quantization: what they became when they were loaded.
    """
    files = sorted(folder.glob("*.safetensors"))
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    changes = () if quantization == "none" else (quantization,)
    return repr((geometry.fingerprint, facts, *changes))


def base_geometry(folder: Path, config: ModelConfig, sites: SiteTable) -> Geometry:
    """The base's geometry from its files, or from the model when it has none (dummy weights)."""
    if any(folder.glob("*.safetensors")):
        geometry = geometry_from_folder(folder)
        found = (replace(m, is_fixed=m.name not in sites.modules) for m in geometry.modules)
        return replace(geometry, modules=tuple(found))
    modules = tuple(
        Module(name, site.kind, site.in_features, site_range.out_features, has_bias=False)
        for name, site_range in sorted(sites.modules.items())
        for site in [sites.sites[site_range.site_id]]
        if site.kind != HEAD
    )
    return Geometry(
        config.model_type,
        "dummy",
        config.num_layers,
        config.vocab_size,
        config.tied_embeddings,
        modules,
        config.ropes[0].dim // 2,
    )
