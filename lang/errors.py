"""Errors of programs and of the backends that they run on."""

from __future__ import annotations


class ProgramError(ValueError):
    """A program asks for what the language or its backend does not have."""


class BackendError(RuntimeError):
    """A backend refused a request or could not be reached; ``status`` is its HTTP status where there is one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
