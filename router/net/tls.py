"""TLS contexts for clients' connections and for those to https:// workers."""

from __future__ import annotations

import ssl

from ...common.api.errors import ConfigError
from ...common.config.tls import https_context, load_chain
from ..config.security import SecurityArgs


def server_context(args: SecurityArgs) -> ssl.SSLContext | None:
    """The context of --ssl-certfile, or None; raises ConfigError for files that cannot be used."""
    return None if args.ssl_certfile is None else https_context(args.ssl_certfile, args.ssl_keyfile)


def worker_context(args: SecurityArgs) -> ssl.SSLContext:
    """The context for https:// workers, with the system's authorities or those of --worker-ca-file instead."""
    context = ssl.create_default_context()
    if args.worker_ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for path in args.worker_ca_file:
            try:
                context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"Cannot use --worker-ca-file {path}: {error}.") from None
    if args.client_cert_path is not None:
        load_chain(context, args.client_cert_path, args.client_key_path, "--client-cert-path and --client-key-path")
    return context
