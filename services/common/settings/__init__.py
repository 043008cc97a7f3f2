"""The LORAPLEX_* variables: their table, their checks and the switches for developers."""
