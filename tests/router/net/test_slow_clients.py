"""Clients that do not read: what waits for them stays bounded, and they are given up."""

from __future__ import annotations

import asyncio


async def test_answers_to_pipelined_requests_wait_for_their_reader(start_router, worker, connect, script):
    """Requests after a response that is not read are not served: their responses would pile up here."""
    answers = 0
    body = b"x" * 2**15

    async def answer(served):
        nonlocal answers
        answers += 1
        served.answer(body=body)

    router = await start_router(await worker(answer))
    client = await connect(router)
    many = 800
    for _ in range(many):
        client.send("POST", "/generate", b"{}")
    before = -1
    while before != answers or not answers:
        before = answers
        await asyncio.sleep(0.1)
    (connection,) = router._connections
    assert connection.transport.get_write_buffer_size() < 2**19
    assert answers < many
    read = 0
    while read < many * len(body):
        read += len(await asyncio.wait_for(client.reader.read(2**20), 5))
    await script.until(lambda: answers == many)


async def test_own_answers_wait_for_their_reader_too(start_router, connect):
    router = await start_router()
    client = await connect(router)
    many = 20_000
    client.writer.write(b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n" * many)
    await asyncio.sleep(0.2)
    (connection,) = router._connections
    assert connection.transport.get_write_buffer_size() < 2**20
    client.leave()


async def test_a_client_that_reads_nothing_is_given_up(start_router, worker, connect, script):
    """Its request occupies the admission limit and a worker's load; of a suspended client, until it is woken."""
    async def pour(served):
        served.head()
        while not served.gone.is_set():
            served.event("x" * 2**16)
            await asyncio.sleep(0)
            await served.writable.wait()
        served.worker.left += 1

    mock = await worker(pour)
    router = await start_router(mock, client_timeout_secs=0.2)
    client = await connect(router)
    client.send("POST", "/generate", b'{"stream": true}')
    await script.until(lambda: mock.posts)
    (listed,) = router.registry
    assert listed.load == 1
    await script.until(lambda: mock.left, seconds=10)
    assert not listed.load
    assert not router._connections
    assert router.metrics.client_disconnects == 1


async def test_a_client_that_reads_slowly_is_not(start_router, worker, connect, script):
    async def pour(served):
        served.head()
        for _ in range(128):
            await served.writable.wait()
            served.event("x" * 2**16)
        served.end()

    router = await start_router(await worker(pour), client_timeout_secs=0.2)
    client = await connect(router)
    client.send("POST", "/generate", b'{"stream": true}')
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        received = await asyncio.wait_for(client.reader.read(2**20), 5)
        assert received
        data += received
        await asyncio.sleep(0.01)
    assert router.metrics.client_disconnects == 0
