"""Streams that end in one step: the last token of each is sent before any clean-up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from baton.common.api.messages import OutputBatch
from baton.common.serving.context.serving_context import ServingContext
from baton.common.serving.respond import PlannedResponse
from baton.tests.bench import dummy_engine


def test_the_engine_sends_last_tokens_before_it_frees_pages():
    engine = dummy_engine.make(4000, 8, shape=dummy_engine.TINY, device="cpu")
    batcher, sent = engine._parts.batcher, []

    def take(message):
        assert isinstance(message, OutputBatch)
        if any(output.finish for output in message.rows()):
            sent.append((len(message.rids), batcher.cache.num_allocated, len(batcher.running)))

    engine._parts.tracker._send = take
    engine.start(4, 20, 10)
    engine.finish()
    assert sent == [(4, 4 * 2, 4)]
    assert batcher.cache.num_allocated == 0 and batcher.cache.num_free == batcher.cache.num_pages


class Ending:
    """A generation that yields its last token at once."""

    def __init__(self, number: int, seen: list[str]):
        self.live = True
        self.choices: list[int] = [number]
        self._seen = seen

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._seen.append(f"closed {self.choices[0]}")

    async def deltas(self, interval):
        self.live = False
        yield self.choices


class NumberAnswer:
    """An Answer of numbers."""

    def start(self, choices):
        """There is nothing to announce."""

    def delta(self, choice):
        return [choice]

    def finish(self, choices):
        return []


def test_the_api_server_sends_last_tokens_before_it_closes_streams():
    seen: list[str] = []

    class Offers:
        class config:
            class http:
                stream_interval = 1

        @staticmethod
        def generation(requests, arrived, continued):
            return Ending(requests[0], seen)

    async def read(number):
        run: Any = PlannedResponse(cast(ServingContext, Offers), cast(Any, [number]), cast(Any, NumberAnswer()),
                                   arrived=0.0)
        async for chunks in run.chunks():
            seen.append(f"sent {chunks[0]}")

    async def both():
        await asyncio.gather(read(0), read(1))

    asyncio.run(both())
    assert seen == ["sent 0", "sent 1", "closed 0", "closed 1"]
