"""The rules for PEFT configs and files, shared by every part of the system.

Pure functions over bytes, with the standard library only. `validate` checks an adapter,
`read_folder` reads its input from disk, and `core_manifest` and `digest_of` give the result its
identity.
"""

from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig, parse_config
from loraplex.adapter_format.files import File
from loraplex.adapter_format.folder import AdapterFolder, read_folder
from loraplex.adapter_format.geometry import Geometry, Module, geometry_from_folder
from loraplex.adapter_format.manifest import Manifest, core_manifest, digest_of, parse_manifest
from loraplex.adapter_format.report import AdapterModule, Report
from loraplex.adapter_format.safetensors_header import (
    TENSOR_FILE,
    Header,
    TensorInfo,
    parse_header,
    prefix_bytes,
)
from loraplex.adapter_format.validate import validate

__all__ = [
    "CONFIG_FILE",
    "TENSOR_FILE",
    "AdapterConfig",
    "AdapterFolder",
    "AdapterModule",
    "File",
    "Geometry",
    "Header",
    "Manifest",
    "Module",
    "Report",
    "TensorInfo",
    "core_manifest",
    "digest_of",
    "geometry_from_folder",
    "parse_config",
    "parse_header",
    "parse_manifest",
    "prefix_bytes",
    "read_folder",
    "validate",
]
