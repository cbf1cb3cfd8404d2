"""A launched step, whatever computes it."""

from __future__ import annotations

from typing import Protocol

from ..request.step_input import StepInput
from ..request.step_output import StepOutput


class Launched(Protocol):
    """A step that was launched."""

    @property
    def step(self) -> StepInput: ...

    def wait(self) -> StepOutput:
        """Waits for the step's results; changes no request. To be called once."""
