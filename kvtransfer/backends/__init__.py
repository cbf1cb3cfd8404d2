"""Transfer backends, which move bytes of KV pages from one process to another."""

from __future__ import annotations

import logging

from ...common.api.errors import ConfigError
from .base import Backend

logger = logging.getLogger(__name__)


def make_backend(name: str, host: str = "127.0.0.1", ib_device: str | None = None) -> Backend:
    """Makes the backend of ``--disaggregation-transfer-backend``; imports its library on demand.

    ``host`` is the address that peers reach this server at, ``ib_device`` is ``--disaggregation-ib-device``.

    Raises ConfigError for an unknown name or a missing library.
    """
    if name == "auto":
        return _make_auto(host)
    if name == "fake":
        from .fake import FakeBackend
        return FakeBackend()
    if name == "nixl":
        from .nixl import NixlBackend
        return NixlBackend()
    if name == "ipc":
        from .ipc import IpcBackend
        return IpcBackend()
    if name == "mooncake":
        from .mooncake import MooncakeBackend
        return MooncakeBackend(host, ib_device)
    raise ConfigError(f"--disaggregation-transfer-backend must be auto, nixl, ipc or mooncake, not {name!r}.")


def _make_auto(host: str) -> Backend:
    """Combines ipc, for a host's memory, with nixl, for a network, where its library is installed."""
    from .auto import AutoBackend
    backends = [make_backend("ipc")]
    try:
        backends.append(make_backend("nixl", host))
    except ConfigError as error:
        logger.warning("Pages travel within this host only: %s", error)
    return AutoBackend(backends)
