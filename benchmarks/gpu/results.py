"""The results of a GPU benchmark, written after every row, so that a run that is cut short leaves
some."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench_runner import DoesNotFit
from benchmarks.gpu.common import print_table, write_results


class Results:
    """Tables of rows, and settings that failed."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        *,
        unprinted: Sequence[str] = (),
        **facts: Any,
    ) -> None:
        """
        Args:
            name: of the file.
            args: `device`, and `out`, the folder that holds a folder for each device.
            unprinted: columns that are only written.
            facts: written before the tables.
        """
        self._name, self._device, self._out = name, torch.device(args.device), args.out
        self._unprinted = unprinted
        self._facts = facts
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Settings that were not measured, since they failed or their results were wrong."""

    def note(self, **facts: Any) -> None:
        """Further facts."""
        self._facts |= facts

    def add(self, table: str, row: dict[str, Any]) -> None:
        """Print a row and write everything."""
        print(f"{table}: {self._printed(row)}", flush=True)
        self.tables.setdefault(table, []).append(row)
        self._write()

    @contextmanager
    def setting(self, name: str) -> Iterator[None]:
        """Measure one setting. An exception is printed and added to `errors`, and the next settings
        are still measured. A setting that does not fit is only named."""
        try:
            yield
        except DoesNotFit:
            print(f"does not fit into memory: {name}", flush=True)
        except Exception as error:
            traceback.print_exc()
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
            print(f"FAILED: {self.errors[-1]}", flush=True)
        self._write()

    def end(self) -> int:
        """Print all tables; returns the number of errors."""
        for rows in self.tables.values():
            print_table([self._printed(row) for row in rows])
        print(f"wrote {self._write()}", flush=True)
        return len(self.errors)

    def _printed(self, row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key not in self._unprinted}

    def _write(self) -> Path:
        found = {**self._facts, "errors": self.errors, **self.tables}
        return write_results(self._name, self._device, found, self._out)
