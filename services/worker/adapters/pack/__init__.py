"""PEFT tensors to images that a device can use without further work."""
