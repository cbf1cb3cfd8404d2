"""Flags of security: keys and certificates of clients, administrators and workers."""

from __future__ import annotations

import dataclasses

from ...common.api.errors import ConfigError
from ...common.config.cli import flag


@dataclasses.dataclass(frozen=True)
class SecurityArgs:
    api_key: str | None = flag(None, help="key that clients must send as 'Authorization: Bearer KEY'")
    api_key_file: str | None = flag(None, metavar="FILE", help="further client keys, one a line; # begins a comment")
    admin_api_key: str | None = flag(
        None, help="key for what changes workers (/add_worker, /flush_cache, ...); client keys do not open that")
    control_plane_api_keys: tuple[str, ...] = flag(
        (), metavar="ID:NAME:admin:KEY", help="further admin keys, in sglang-router's form")
    worker_api_key: str | None = flag(
        None, help=(
        "key that is sent to workers; a client's key that the router knows is not forwarded. /add_worker may name "
        "another for one worker"))
    ssl_certfile: str | None = flag(
        None, metavar="FILE", names=("--tls-cert-path",), help="certificate chain (PEM): serve HTTPS")
    ssl_keyfile: str | None = flag(
        None, metavar="FILE", names=("--tls-key-path",), help="private key (PEM) of --ssl-certfile")
    worker_ca_file: tuple[str, ...] = flag(
        (), metavar="FILE", names=("--ca-cert-paths",), help="authorities (PEM) behind https:// workers")
    client_cert_path: str | None = flag(None, metavar="FILE", help="certificate (PEM) shown to https:// workers")
    client_key_path: str | None = flag(None, metavar="FILE", help="private key (PEM) of --client-cert-path")
    cors_allowed_origins: tuple[str, ...] = flag(
        (), metavar="ORIGIN", help="origins whose pages may call the router from a browser; * allows all")

    def __post_init__(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both or none.")
        if (self.client_cert_path is None) != (self.client_key_path is None):
            raise ConfigError("--client-cert-path and --client-key-path go together: give both or none.")
        for entry in self.control_plane_api_keys:
            if len(parts := entry.split(":", 3)) != 4 or parts[2].lower() != "admin" or not parts[3]:
                raise ConfigError("--control-plane-api-keys takes ID:NAME:admin:KEY; a reader's key is a client key: "
                                  "use --api-key or --api-key-file.")

    @property
    def client_keys(self) -> tuple[str, ...]:
        """All keys of clients; raises ConfigError when --api-key-file cannot be read or holds none."""
        keys = (self.api_key,) if self.api_key else ()
        if self.api_key_file is None:
            return keys
        try:
            with open(self.api_key_file, encoding="utf-8") as file:
                lines = [line.partition("#")[0].strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read --api-key-file {self.api_key_file}: {error}.") from None
        file_keys = tuple(line for line in lines if line)
        if not file_keys:  # An empty file would open the router to everyone.
            raise ConfigError(f"--api-key-file {self.api_key_file} holds no key.")
        return keys + file_keys

    @property
    def admin_keys(self) -> tuple[str, ...]:
        own = (self.admin_api_key,) if self.admin_api_key else ()
        return own + tuple(entry.split(":", 3)[3] for entry in self.control_plane_api_keys)
