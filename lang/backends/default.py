"""The backend that programs run on where a call names none."""

from __future__ import annotations

from typing import Any

from ..errors import ProgramError
from .base import Backend

_CHOSEN: dict[str, Backend] = {}


def set_default_backend(backend: Any) -> None:
    """Sets the backend of all runs that name none: a backend, or a Runtime."""
    _CHOSEN["default"] = _resolved(backend)


def chosen_backend(backend: Any = None) -> Backend:
    """``backend``, or the default one; raises ProgramError where neither is there."""
    if backend is not None:
        return _resolved(backend)
    if "default" not in _CHOSEN:
        raise ProgramError('No backend is set: call set_default_backend(RuntimeEndpoint("http://localhost:30000")), or '
                           "give backend=.")
    return _CHOSEN["default"]


def flush_cache(backend: Any = None) -> None:
    """Empties the backend's prefix cache."""
    chosen_backend(backend).flush_cache()


def get_server_info(backend: Any = None) -> Any:
    """The backend's configuration and state."""
    return chosen_backend(backend).get_server_info()


def _resolved(backend: Any) -> Backend:
    found: Backend = getattr(backend, "endpoint", backend)
    return found
