"""Readers of quantised weights, one module for each file format; the result is a `CodedWeight`."""
