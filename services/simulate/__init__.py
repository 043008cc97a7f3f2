"""Runs the worker's engine and the gateway's admission and router under a virtual clock."""
