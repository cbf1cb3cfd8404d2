"""Transfer backends: how bytes of KV pages get from one process to another."""

from __future__ import annotations

from ...common.api.errors import ConfigError
from .base import Backend


def make_backend(name: str, host: str = "127.0.0.1", ib_device: str | None = None) -> Backend:
    """The backend of ``--disaggregation-transfer-backend``; imports what it needs on demand.

    ``host`` is the address that peers reach this server at, ``ib_device`` is ``--disaggregation-ib-device``.

    Raises ConfigError for an unknown name or a missing library.
    """
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
    raise ConfigError(f"--disaggregation-transfer-backend must be nixl, ipc, mooncake or fake, not {name!r}.")
