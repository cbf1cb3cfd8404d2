from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time

import aiohttp
import msgspec
import pytest

from baton.common.api.errors import ConfigError
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.bootstrap import BootstrapServer, NotRegistered, fetch_ranks, register_rank
from baton.kvtransfer.protocol.messages import RankInfo

LAYOUT = KVLayout(groups=(2,), num_kv_heads=2, head_dim=8, page_size=4, dtype="float32")


def info(instance: str = "a", rank: int = 0, tp_size: int = 1, dp_rank: int = 0, dp_size: int = 1) -> RankInfo:
    return RankInfo(instance, "tcp://127.0.0.1:1", rank, tp_size, LAYOUT, "fake", dp_rank=dp_rank, dp_size=dp_size)


async def test_a_rank_is_found_once_registered_and_a_restarted_one_replaces_it():
    async with BootstrapServer("127.0.0.1", 0) as server:
        address, url = ("127.0.0.1", server.port), f"http://127.0.0.1:{server.port}"
        with pytest.raises(NotRegistered):
            await asyncio.to_thread(fetch_ranks, address, 1.0)
        await asyncio.to_thread(register_rank, url, info("a"))
        assert await asyncio.to_thread(fetch_ranks, address, 1.0) == [info("a")]
        await asyncio.to_thread(register_rank, url, info("c"))
        assert await asyncio.to_thread(fetch_ranks, address, 1.0) == [info("c")]


async def test_a_server_is_found_once_all_of_its_ranks_are_there():
    async with BootstrapServer("127.0.0.1", 0) as server:
        address, url = ("127.0.0.1", server.port), f"http://127.0.0.1:{server.port}"
        await asyncio.to_thread(register_rank, url, info("b", rank=1, tp_size=2))
        with pytest.raises(NotRegistered):
            await asyncio.to_thread(fetch_ranks, address, 1.0)
        await asyncio.to_thread(register_rank, url, info("a", rank=0, tp_size=2))
        expected = [info("a", 0, 2), info("b", 1, 2)]
        assert await asyncio.to_thread(fetch_ranks, address, 1.0) == expected
        await asyncio.to_thread(register_rank, url, info("alone"))  # restarted with fewer
        assert await asyncio.to_thread(fetch_ranks, address, 1.0) == [info("alone")]


async def test_stages_are_ranks_of_their_own():
    async with BootstrapServer("127.0.0.1", 0) as server:
        address, url = ("127.0.0.1", server.port), f"http://127.0.0.1:{server.port}"
        ranks = [msgspec.structs.replace(info(f"{stage}{rank}", rank, 2), pp_rank=stage, pp_size=2)
                 for stage in range(2) for rank in range(2)]
        for rank in reversed(ranks):
            with pytest.raises(NotRegistered):
                await asyncio.to_thread(fetch_ranks, address, 1.0)
            await asyncio.to_thread(register_rank, url, rank)
        assert await asyncio.to_thread(fetch_ranks, address, 1.0) == ranks


async def test_answers_to_bad_requests_are_sentences():
    async with BootstrapServer("127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}"
        assert (await session.get(f"{url}/health")).status == 200
        for method, path, body, status, words in (
                ("GET", "/ranks", None, 404, "0 of the 1 ranks of this prefill server have registered"),
                ("PUT", "/register", b"{}", 400, "no rank description"),
                ("PUT", "/register", b"\xff", 400, "no rank description")):
            response = await session.request(method, url + path, data=body)
            assert response.status == status
            assert words in (await response.json())["error"]["message"]
        assert (await session.put(f"{url}/register", data=b" " * 2_000_000)).status == 413


async def test_an_occupied_port_is_a_sentence():
    async with BootstrapServer("127.0.0.1", 0) as server:
        sentence = f"Cannot listen on 127.0.0.1 port {server.port}: .*--disaggregation-bootstrap-port"
        with pytest.raises(ConfigError, match=sentence):
            async with BootstrapServer("127.0.0.1", server.port):
                pass


async def test_ranks_of_attention_groups_are_listed_group_by_group():
    async with BootstrapServer("127.0.0.1", 0) as server:
        url, address = f"http://127.0.0.1:{server.port}", ("127.0.0.1", server.port)
        places = [(dp_rank, rank) for dp_rank in range(2) for rank in range(2)]
        infos = [info(f"{dp_rank}.{rank}", rank, 2, dp_rank, 2) for dp_rank, rank in places]
        for one in (infos[3], infos[0], infos[2]):
            await asyncio.to_thread(register_rank, url, one)
        with pytest.raises(NotRegistered):
            await asyncio.to_thread(fetch_ranks, address, 1.0)
        await asyncio.to_thread(register_rank, url, infos[1])
        assert await asyncio.to_thread(fetch_ranks, address, 1.0) == infos


async def test_registering_waits_for_the_server_but_not_for_ever():
    async with BootstrapServer("127.0.0.1", 0) as server:
        port = server.port
    with pytest.raises(ConfigError, match="Rank 0 could not register"):
        await asyncio.to_thread(register_rank, f"http://127.0.0.1:{port}", info(), 0.2)
    thread = threading.Thread(target=register_rank, args=(f"http://127.0.0.1:{port}", info(), 10.0))
    thread.start()
    await asyncio.sleep(0.2)
    async with BootstrapServer("127.0.0.1", port) as server:
        await asyncio.to_thread(thread.join)
        assert server.ranks == {(0, 0, 0): info()}


@contextlib.asynccontextmanager
async def answering(answer: bytes, end: bytes):
    """The address of a server that says ``answer`` to all, once it has read up to ``end``."""
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(end)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]


async def test_something_else_at_the_address_is_an_error_not_a_hang():
    async with answering(b"SSH-2.0-what\r\n", b"\n") as address:
        with pytest.raises(OSError, match="it speaks no HTTP"):
            await asyncio.to_thread(fetch_ranks, address, 1.0)


async def test_an_answer_that_is_no_text_is_an_error():
    said = b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n[{"instance":"\xff\xff"}]'
    async with answering(said, b"\r\n\r\n") as address:
        with pytest.raises(OSError, match="something else than its ranks"):
            await asyncio.to_thread(fetch_ranks, address, 1.0)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "a\x00b"])
def test_a_host_that_cannot_be_is_an_error(host):
    """Of any other kind it would be lost in the look-up's thread, and nobody would ask for that address again."""
    with pytest.raises(OSError, match="is no host name"):
        fetch_ranks((host, 80), 1.0)


async def test_an_answer_that_drips_ends_by_the_deadline():
    """Four such servers would otherwise hold all threads of the look-ups, for ever."""
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for letter in itertools.chain(b"HTTP/1.1 200 OK\r\nServer: ", itertools.repeat(0x61)):
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="it did not answer within 0.3 s"):
        await asyncio.wait_for(asyncio.to_thread(fetch_ranks, server.sockets[0].getsockname()[:2], 0.3), 20)
    assert time.monotonic() - began >= 0.3
    server.close()
