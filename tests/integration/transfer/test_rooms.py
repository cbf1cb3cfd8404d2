"""Halves of one request that reach two servers by themselves: their room is theirs alone, and neither waits in vain."""

import asyncio

import aiohttp

from baton.tests.helpers.harness import get_json

SOON = 5.0  # a half that is left alone waits 30 s for the other


def half_of(relay, room, text="Hello"):
    host = "127.0.0.1"
    port = int(relay.router.argv[relay.router.argv.index("--prefill") + 2])
    return {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "bootstrap_host": host,
            "bootstrap_port": port, "bootstrap_room": room}


async def ask(session, server, body):
    async with session.post(server.url + "/generate", json=body) as answer:
        return answer.status, await answer.json()


async def waiting(server, count):
    while get_json(server.url + "/get_server_info")["internal_states"][0]["num_waiting"] != count:
        await asyncio.sleep(0.02)


async def test_a_room_that_is_in_use_is_a_conflict_and_free_again_later(relay):
    (prefill,), (decode,) = relay.prefill, relay.decode
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            first = asyncio.ensure_future(ask(session, prefill, half_of(relay, 7001)))
            await asyncio.wait_for(waiting(prefill, 1), SOON)
            status, told = await ask(session, prefill, half_of(relay, 7001))
            assert status == 409 and "bootstrap_room 7001 is in use" in told["error"]["message"]
            (status, _), (prefilled, _) = await asyncio.gather(ask(session, decode, half_of(relay, 7001)), first)
            assert (status, prefilled) == (200, 200)
    relay.prefill[0].assert_clean()


async def test_a_room_that_decode_receives_in_is_a_conflict_there(relay):
    (prefill,), (decode,) = relay.prefill, relay.decode
    async with aiohttp.ClientSession() as session:
        first = asyncio.ensure_future(ask(session, decode, half_of(relay, 7003)))
        while not get_json(decode.url + "/get_server_info")["internal_states"][0]["num_transferring"]:
            await asyncio.sleep(0.02)
        status, told = await ask(session, decode, half_of(relay, 7003))
        assert status == 409 and "bootstrap_room 7003 is in use" in told["error"]["message"]
        (status, _), (prefilled, _) = await asyncio.gather(first, ask(session, prefill, half_of(relay, 7003)))
        assert (status, prefilled) == (200, 200)
    prefill.assert_clean()
    decode.assert_clean()


async def test_a_client_that_leaves_decode_ends_the_half_at_prefill(relay):
    """Prefill's client is another one, and stays."""
    (prefill,), (decode,) = relay.prefill, relay.decode
    async with aiohttp.ClientSession() as session, aiohttp.ClientSession() as other:
        leaving = asyncio.ensure_future(ask(other, decode, half_of(relay, 7002)))
        while not get_json(decode.url + "/get_server_info")["internal_states"][0]["num_transferring"]:
            await asyncio.sleep(0.02)
        leaving.cancel()
        status, told = await asyncio.wait_for(ask(session, prefill, half_of(relay, 7002)), SOON)
        assert status == 499, told
    prefill.assert_clean()
    decode.assert_clean()
