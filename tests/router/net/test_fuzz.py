"""A short run of tests/bench/router_fuzz.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from urllib.parse import quote

import pytest

_PATH = Path(__file__).resolve().parents[2] / "bench" / "router_fuzz.py"
_spec = importlib.util.spec_from_file_location("router_fuzz", _PATH)
assert _spec is not None and _spec.loader is not None
router_fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(router_fuzz)


@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
async def test_random_requests_find_no_error_of_ours(pairs):
    statuses = await router_fuzz.fuzz(600, 7, pairs=pairs)
    assert statuses[200] > 40
    assert statuses[400] > 10
    assert statuses[401] > 20


_NUMBERS = ["-1", "0", "18446744073709551615", "18446744073709551616", "9" * 5000, "-9223372036854775809", "1e400",
            "-1e400", "1.5", "-0.0", "NaN", "Infinity", "true", "null", '""', '"1"', "[]", "[1]", "{}", '"\\ud800"',
            "[" * 1000]
_FIELDS = ["bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank",
           "disagg_prefill_dp_rank", "priority", "n", "best_of", "seed", "temperature", "top_k", "max_tokens",
           "stream", "session_params", "session_id", "prompt_cache_key", "user", "model", "input_ids",
           "sampling_params"]
_PARAMETERS = ["bootstrap_port", "force", "role", "worker_type", "api_key", "url", "since", "priority"]


@pytest.mark.parametrize("options", [
    {"policy": "cache_aware", "max_concurrent_requests": 1, "queue_size": 100},
    {"policy": "consistent_hash", "rate_limit_per_key": 100_000.0},
    {"pd_disaggregation": True, "policy": "cache_exact", "slo_ttft_ms": 60_000.0},
], ids=["whole", "hashed", "pairs"])
async def test_no_number_is_an_error_of_ours(options, start_router, worker, connect, caplog):
    """Each field that the router may look at, with each odd number, in bodies, queries and headers."""
    options = dict(options)
    pairs = options.pop("pd_disaggregation", False)
    mocks = [await worker(), await worker()]
    workers = {"prefill": mocks[:1], "decode": mocks[1:]} if pairs else {}
    router = await start_router(*(() if pairs else mocks), **workers, **options)
    client = await connect(router)
    seen = set()

    async def ask(method, path, body=b"", headers=""):
        client.send(method, path, body, headers)
        reply = await client.reply()
        assert reply.status < 500, (method, path, body[:200], headers, reply.body)
        seen.add(reply.status)

    for number in _NUMBERS:
        for path, prompt in (("/v1/chat/completions", '"messages": []'), ("/generate", '"text": "a"')):
            for field in _FIELDS:
                await ask("POST", path, b"{%b, \"%b\": %b}" % (prompt.encode(), field.encode(), number.encode()))
        await ask("POST", "/generate", b"{}", f"x-priority: {number[:5000]}\r\n")
        for name in _PARAMETERS:
            quoted = quote(number[:1000])
            fields = {"url": "http://127.0.0.1:1"} | {name: number[:1000]}
            for path in ("/add_worker", "/remove_worker", "/workers"):
                await ask("POST", path, json.dumps(fields).encode())
                await ask("POST", f"{path}?url=http://127.0.0.1:1&{name}={quoted}")
            await ask("POST", "/add_worker", b'{"url": "http://127.0.0.1:1", "%b": %b}' % (
                name.encode(), number.encode()))
            await ask("POST", "/remove_worker?url=http://127.0.0.1:1")
            for path in ("/dashboard/data", "/list_workers", "/workers"):
                await ask("GET", f"{path}?{name}={quoted}")
        await ask("GET", f"/workers/{quote(number[:1000], safe='')}")
    assert {200, 400} <= seen
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("length", [b"9" * 30, b"9" * 5000, b"-1", b"1e3", b"0x10", b"1_0"])
async def test_no_length_is_an_error_of_ours(length, start_router, connect, caplog):
    client = await connect(await start_router())
    client.writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: %b\r\n\r\n{}" % length)
    assert (await client.reply()).status in (400, 413)
    assert not [record for record in caplog.records if record.exc_info]
