"""The error about an InferenceService that is wrong, in one line."""

from __future__ import annotations

from diptych_protocol import DiptychError


class SpecError(DiptychError, ValueError):
    """An InferenceService that can never work as written. `str()` is `field: problem`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        """Dotted path of the field from the object's root, such as `spec.prefill.replicas`."""
        self.problem = problem
