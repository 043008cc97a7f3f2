"""The engine process: its loop, `Engine.step` and the processing of outputs."""
