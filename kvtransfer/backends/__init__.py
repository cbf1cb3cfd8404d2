"""Transfer backends, which move bytes of KV pages from one process to another. One backend a file, registered there."""

from __future__ import annotations

from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from .base import Backend, BackendSettings


def make_backend(name: str, host: str = "127.0.0.1", ib_device: str | None = None) -> Backend:
    """Makes the backend of ``--disaggregation-transfer-backend``; imports its library on demand.

    ``host`` is the address that peers reach this server at, ``ib_device`` is ``--disaggregation-ib-device``.

    Raises ConfigError for an unknown name or a missing library.
    """
    backend: Backend = TRANSFER_BACKENDS.get(name)(BackendSettings(host, ib_device))
    return backend
