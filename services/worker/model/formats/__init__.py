"""Layouts of quantised weights in files, one module each: files -> `CodedWeight`."""
