"""Collects all refusals and warnings of a validation."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.errors import InvalidAdapter, Violation

MAX_FINDINGS = 100
"""Most findings of one kind. A file with ten thousand bad tensors is described well enough by the
first hundred."""


@dataclass(slots=True)
class Findings:
    """Collects violations; nothing is raised before `raise_if_refused`."""

    refusals: list[Violation] = field(default_factory=list)
    warnings: list[Violation] = field(default_factory=list)
    misfits: list[Violation] = field(default_factory=list)
    """Refusals of tensors that would fit another base."""

    def refuse(self, path: str, value: object, description: str) -> None:
        """Record that the adapter cannot be served correctly."""
        if len(self.refusals) < MAX_FINDINGS:
            self.refusals.append(Violation.of(path, value, description))

    def misfit(self, path: str, value: object, description: str) -> None:
        """Record a tensor that does not fit the base."""
        self.misfits.append(Violation.of(path, value, description))
        self.refuse(path, value, description)

    def name_base(self, violation: Violation) -> None:
        """Replace the refusals of all tensors that do not fit the base by one, about the base."""
        others = [each for each in self.refusals if each not in self.misfits]
        self.refusals = [violation, *others]

    def warn(self, path: str, value: object, description: str) -> None:
        """Record something harmless that its publisher should know."""
        if len(self.warnings) < MAX_FINDINGS:
            self.warnings.append(Violation.of(path, value, description))

    def include(self, error: InvalidAdapter) -> None:
        """Add the violations of an error that a part of the validation raised."""
        num_left = MAX_FINDINGS - len(self.refusals)
        self.refusals.extend(error.violations[:num_left])

    def raise_if_refused(self, *, strict: bool = False) -> None:
        """Raise `InvalidAdapter` with all refusals; `strict` counts warnings as refusals."""
        violations = self.refusals + (self.warnings if strict else [])
        if violations:
            raise InvalidAdapter.of(violations)
