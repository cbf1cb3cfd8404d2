"""Telling a router, where it asks, which pages of the prefix cache a prompt is made of.

A router that follows the server's KV events knows which pages are cached, but of a text or a chat not
which pages it comes to: that takes this server's template and tokenizer. So it asks once for each new text.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from ...api.kv_events import PROMPT_PAGES_HEADER, encode_pages
from ...api.messages import Generate
from ..context import ServingContext


def note_pages(front: ServingContext, request: web.Request, requests: Sequence[Generate]) -> None:
    """Keep the first prompt's page hashes for the answer's head, where they were asked for."""
    if PROMPT_PAGES_HEADER in request.headers:
        first = requests[0]
        ids = first.input_ids if first.input_embeds is None else []  # pages of embeddings are never cached
        request[PROMPT_PAGES_HEADER] = encode_pages(ids, front.config.cache.page_size)


async def tell_pages(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler of ``on_response_prepare``."""
    if (pages := request.get(PROMPT_PAGES_HEADER)) is not None:
        response.headers[PROMPT_PAGES_HEADER] = pages
