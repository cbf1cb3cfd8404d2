"""The page at ``/``: names the server and links to its main endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import msgspec

from ..version import __version__

_STYLE = "body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em;color-scheme:light dark}"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page's Content-Security-Policy."""


def about(description: str, links: Mapping[str, str], *, as_html: bool) -> bytes:
    """``description`` is one sentence, ``links`` describes each path. HTML for browsers, else JSON."""
    if not as_html:
        return msgspec.json.encode({"name": "Baton", "version": __version__, "description": description,
                                    "links": links})
    rows = "".join(f'<li><a href="{escape(path)}">{escape(path)}</a>: {escape(text)}</li>'
                   for path, text in links.items())
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>Baton</title><style>{_STYLE}</style><h1>Baton {__version__}</h1><p>{escape(description)}</p>"
            f"<ul>{rows}</ul></html>\n").encode()
