"""Many requests to a server's /generate at once, by one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import aiohttp

Reply = tuple[int, dict[str, Any]]
"""Status and body."""


async def generate_all(url: str, bodies: Iterable[dict[str, Any]], concurrency: int,
                       timeout: float = 600.0) -> list[Reply]:
    """Sends requests, as many at once as ``concurrency`` says; returns the replies in their order."""
    free = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                     timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        async def generate(body: dict[str, Any]) -> Reply:
            async with free, session.post(f"{url}/generate", json=body) as response:
                return response.status, await response.json()

        return await asyncio.gather(*map(generate, bodies))
