"""The page hashes of a prompt, in a response header for routers that request it.

A router that follows the server's KV events knows which pages are cached. It cannot compute the page hashes of a text
or a chat: that takes this server's template and tokenizer. So it requests them once for each new text.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from ..api.kv_events import PROMPT_PAGES_HEADER, encode_pages
from ..api.messages import Generate
from .context.serving_context import ServingContext


def record_prompt_pages(context: ServingContext, request: web.Request, requests: Sequence[Generate]) -> None:
    """Stores the first prompt's page hashes for the response's head, where the request asks for them."""
    if PROMPT_PAGES_HEADER in request.headers:
        first = requests[0]
        ids = first.input_ids if first.input_embeds is None else []  # pages of embeddings are never cached
        request[PROMPT_PAGES_HEADER] = encode_pages(ids, context.config.cache.page_size)


async def add_prompt_pages(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the stored page hashes to a response's head; a signal handler of ``on_response_prepare``."""
    if (pages := request.get(PROMPT_PAGES_HEADER)) is not None:
        response.headers[PROMPT_PAGES_HEADER] = pages
