"""The page at ``/``: what answers here, and where to go on."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import msgspec

from ..version import __version__

_STYLE = "body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em;color-scheme:light dark}"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy of the page."""


def about(what: str, links: Mapping[str, str], *, as_html: bool) -> bytes:
    """``what`` is one sentence, ``links`` says what each path is for. HTML for browsers, else JSON."""
    if not as_html:
        return msgspec.json.encode({"name": "Baton", "version": __version__, "description": what, "links": links})
    rows = "".join(f'<li><a href="{escape(path)}">{escape(path)}</a>: {escape(told)}</li>'
                   for path, told in links.items())
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>Baton</title><style>{_STYLE}</style><h1>Baton {__version__}</h1><p>{escape(what)}</p>"
            f"<ul>{rows}</ul></html>\n").encode()
