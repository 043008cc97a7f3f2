"""Constrained output: grammars checked by the door, compiled and followed by the engine."""
