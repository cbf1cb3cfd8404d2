"""Flags of servers that speak HTTPS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import Rule, check_own_rules
from ..tls import https_context


@dataclass(frozen=True)
class TlsArgs:
    ssl_certfile: str | None = flag(None, metavar="FILE", help="certificate chain (PEM): serve HTTPS")
    ssl_keyfile: str | None = flag(None, metavar="FILE", help="private key (PEM) of --ssl-certfile")
    ssl_keyfile_password: str | None = flag(None, metavar="TEXT", help="password of --ssl-keyfile")
    ssl_ca_certs: str | None = flag(None, metavar="FILE", help=(
        "authorities (PEM) of clients' certificates, which --ssl-cert-reqs asks for"))
    ssl_cert_reqs: Literal[0, 1, 2] = flag(0, help=(
        "certificates of clients: 0 asks for none, 1 refuses those of other authorities than --ssl-ca-certs, 2 also "
        "clients without"))
    enable_ssl_refresh: bool = flag(False, help=(
        "read certificate and key again when their files change, for connections that come then"))

    own_flag_rules: ClassVar[tuple[Rule[TlsArgs], ...]] = (
        Rule(lambda c: (c.ssl_certfile is None) != (c.ssl_keyfile is None),
             "--ssl-certfile and --ssl-keyfile go together: give both or none."),
        Rule(lambda c: c.ssl_certfile is None and (
            c.ssl_keyfile_password is not None or c.ssl_ca_certs is not None or c.ssl_cert_reqs
            or c.enable_ssl_refresh),
             "--ssl-keyfile-password, --ssl-ca-certs, --ssl-cert-reqs and --enable-ssl-refresh are for servers with a "
             "certificate: give --ssl-certfile and --ssl-keyfile."),
        Rule(lambda c: c.ssl_cert_reqs and c.ssl_ca_certs is None,
             "--ssl-cert-reqs {ssl_cert_reqs} needs the authorities of clients' certificates: give --ssl-ca-certs."),
    )

    def __post_init__(self) -> None:
        check_own_rules(self)

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    def context(self) -> ssl.SSLContext | None:
        """Returns the server's context, None without a certificate; raises ConfigError for files that cannot be
        used."""
        if self.ssl_certfile is None:
            return None
        context = https_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"Cannot use --ssl-ca-certs {self.ssl_ca_certs}: {error}.") from None
        context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context
