"""Contexts of servers that speak HTTPS."""

from __future__ import annotations

import ssl

from ..api.errors import ConfigError


def https_context(certificate: str, key: str | None, password: str | None = None) -> ssl.SSLContext:
    """Returns the context of a certificate chain and its key (PEM files); raises ConfigError where they cannot be
    used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_chain(context, certificate, key, "--ssl-certfile and --ssl-keyfile", password)
    return context


def load_chain(context: ssl.SSLContext, certificate: str, key: str | None, names: str,
               password: str | None = None) -> None:
    """Loads a certificate chain and its key, the files of the flags ``names``; raises ConfigError."""
    try:
        context.load_cert_chain(certificate, key, password=lambda: password or "")
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"Cannot use {names} ({certificate}, {key}): {error}.") from None
