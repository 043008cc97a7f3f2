"""Checks that the packages of the extra `local`, which a stack needs, are installed."""

from __future__ import annotations

from importlib.util import find_spec

from loraplex.errors import Unsupported

MODULES = (
    "boto3", "cryptography", "grpc_health", "grpc_reflection", "huggingface_hub", "jinja2",
    "llguidance", "msgspec", "numpy", "prometheus_client", "python_multipart", "redis",
    "safetensors", "starlette", "tokenizers", "uvicorn",
)  # fmt: skip
"""One module of each package that every stack needs."""


def check_packages() -> None:
    """Raises Unsupported that names the packages that are missing and how to install them.

    A client is installed without them, and its `loraplex up` would otherwise end in a traceback.
    """
    missing = [module for module in MODULES if find_spec(module) is None]
    if missing:
        raise Unsupported(
            f"the packages of a server are not installed ({', '.join(missing)}): "
            "run `pip install 'loraplex[local]'`",
            reason="NOT_INSTALLED",
        )
