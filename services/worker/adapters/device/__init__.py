"""Copies images to blocks of the arena and enters adapters into the device tables."""
