"""The process that validates adapters whose config and header are large."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loraplex.adapter_format import File, Geometry, Header, Report, parse_header, validate
from loraplex.errors import InvalidAdapter, Violation
from loraplex_services.common.limits import VALIDATIONS
from loraplex_services.common.processes.job_process import limit_memory, read_setup, serve


@dataclass(frozen=True, slots=True)
class ValidationJob:
    """The arguments of `validate`."""

    config_bytes: bytes
    header_bytes: bytes
    tensor_file_size: int
    files: tuple[File, ...]
    geometry: Geometry
    max_rank: int
    strict: bool
    base_names: tuple[str, ...] = ()
    allow_missing: bool = False

    def run(self) -> tuple[Report, Header]:
        """Raises: InvalidAdapter."""
        report = validate(
            self.config_bytes,
            self.header_bytes,
            self.tensor_file_size,
            self.files,
            self.geometry,
            self.max_rank,
            self.strict,
            base_names=self.base_names,
            allow_missing=self.allow_missing,
        )
        return report, parse_header(self.header_bytes, self.tensor_file_size)


@dataclass(frozen=True, slots=True)
class ValidationOutcome:
    """A valid adapter, or why it is refused."""

    valid: tuple[Report, Header] | None = None
    violations: tuple[Violation, ...] = ()


def _answer(content: bytes) -> bytes:
    try:
        outcome = ValidationOutcome(msgspec.msgpack.decode(content, type=ValidationJob).run())
    except InvalidAdapter as error:
        outcome = ValidationOutcome(violations=tuple(error.violations))
    except MemoryError:
        description = "needs too much memory to validate; it has too many tensors or modules"
        outcome = ValidationOutcome(
            violations=(Violation.of("adapter_model.safetensors", "header", description),)
        )
    return msgspec.msgpack.encode(outcome)


def main() -> None:
    """Serve jobs until stdin closes."""
    limit_memory(VALIDATIONS.memory_bytes)
    read_setup()
    serve(_answer)


if __name__ == "__main__":
    main()
