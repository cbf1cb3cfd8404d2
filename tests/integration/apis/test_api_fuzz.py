"""A short run of the API's fuzz; ``tests/bench/api_fuzz.py`` sends as many requests as one likes."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.tests.bench.api_fuzz import assert_well, document_of, fuzz
from baton.tests.bench.api_requests import Requests, Schemas


@pytest.mark.parametrize("through", ["unified", "relay"])
def test_no_request_breaks_a_server(request, through):
    front = request.getfixturevalue(through)
    workers = getattr(front, "workers", [front])
    statuses = asyncio.run(fuzz(front.url, document_of(front.url), 300, seed=11, concurrency=4))
    assert statuses[200] > 30 and statuses[400] > 30, statuses
    assert_well(getattr(front, "router", front), workers)


def test_requests_are_mostly_what_the_document_allows(unified):
    """Else the fuzz would test the JSON decoder alone."""
    document = document_of(unified.url)
    schemas = Schemas(document, random.Random(1))
    chat = document["components"]["schemas"]["ChatRequest"]
    made = [schemas.value(chat) for _ in range(200)]
    assert all(isinstance(body["messages"], list) for body in made)
    assert len({name for body in made for name in body}) > 30
    requests = Requests(document, random.Random(1))
    paths = {requests.next()[1].split(b" ", 2)[1].split(b"?")[0] for _ in range(2000)}
    assert {b"/v1/chat/completions", b"/v1/messages", b"/v1/batches", b"/tokenize"} <= paths
