"""Messages between the API server process and its packing processes, as lines of JSON."""

from __future__ import annotations

import msgspec

from loraplex.adapter_format.geometry import Geometry
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.messages import WireError

DAMAGED_IMAGE = "damaged-image"
"""The name that a damaged image is given."""


class PackSetup(msgspec.Struct, frozen=True):
    """The base and the layout for which adapters are packed."""

    geometry: Geometry
    layout: AdapterLayout


class PackJob(msgspec.Struct, frozen=True):
    """An adapter's folder and the sha256 of its tensor file."""

    folder: str
    sha256: str


class Prepared(msgspec.Struct, frozen=True):
    """The folder has a good image, or the engine has to make it."""

    num_pages: int = 0
    """0 = the engine makes the image, because it depends on the base's weights."""
    error: WireError | None = None
    """Why the adapter cannot be served."""
