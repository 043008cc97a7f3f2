"""Chooses the worker of a request, and continues a stream on another worker."""
