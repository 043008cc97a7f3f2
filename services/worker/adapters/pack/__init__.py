"""Turns PEFT tensors into images that a device can use without further work."""
