"""Addresses of workers."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit


class Endpoint(NamedTuple):
    """A worker's base URL, taken apart. ``prefix`` is the path that precedes every request's ("" mostly)."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read ``http://host[:port][/prefix]`` (or https); raises ValueError with a sentence for the user."""
        url = url.strip()
        if any(not "!" <= c <= "~" for c in url):  # urlsplit would drop line breaks in silence.
            raise ValueError(f"Worker URL {url!r} has characters that a URL cannot have.")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError(f"Worker URL {url!r} is malformed: use http://HOST:PORT.") from None
        extra = parts.query or parts.fragment or parts.username
        if parts.scheme not in ("http", "https") or not parts.hostname or extra:
            raise ValueError(f"Worker URL {url!r} is malformed: use http://HOST:PORT.")
        if port == 0:
            raise ValueError(f"Worker URL {url!r} names port 0: use the port that the worker listens on.")
        try:
            parts.hostname.encode("idna")  # as the resolver will: it raises what no caller of it expects
        except UnicodeError:
            raise ValueError(f"Worker URL {url!r} names a host with an empty part, or one longer than 63 "
                             "characters.") from None
        port = port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """``host:port`` as the Host header wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The normalized form: two spellings of one worker compare equal."""
        return f"{self.scheme}://{self.authority}{self.prefix}"
