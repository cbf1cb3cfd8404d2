"""Service level objectives of requests, in bodies and headers: checked, and counted by whether they were met."""

from __future__ import annotations

import aiohttp
import pytest

from baton.common.api.errors import InvalidRequest
from baton.common.serving.protocol.slo import HEADER_SLO, Slo, slo_of, slo_of_headers

GENERATE = {"text": "hello world", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def counted(http: aiohttp.ClientSession) -> dict[tuple[str, str], float]:
    async with http.get("/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("baton:slo_requests_total{")]
    return {(line.split('objective="')[1].split('"')[0], line.split('outcome="')[1].split('"')[0]):
            float(line.split()[-1]) for line in lines}


async def test_objectives_are_counted(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as answer:
        model = (await answer.json())["data"][0]["id"]
    before = await counted(http)
    easy, hard = {"slo_ttft_ms": 60_000, "slo_tpot_ms": 60_000.5}, {"slo_ttft_ms": 0.001}
    for path, body, headers in (("/generate", GENERATE | easy, {}), ("/v1/chat/completions", CHAT | hard, {}),
                                ("/v1/completions", {"prompt": "hello", "max_tokens": 4} | hard, {}),
                                ("/v1/messages", CHAT | hard | {"model": model}, {}),
                                ("/v1/responses", {"input": "hello", "max_output_tokens": 4} | hard, {}),
                                ("/generate", GENERATE, {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "0.0001"}),
                                ("/generate", GENERATE | hard, {"x-slo-ttft-ms": "60000"}),
                                ("/generate", GENERATE, {})):
        async with http.post(path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
    after = await counted(http)
    found = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
    assert found == {("ttft", "met"): 2, ("ttft", "missed"): 5, ("tpot", "met"): 1, ("tpot", "missed"): 1}


async def test_wrong_objectives_are_refused(http: aiohttp.ClientSession) -> None:
    async with http.post("/generate", json=GENERATE | {"slo_ttft_ms": 0}) as answer:
        assert answer.status == 400 and "slo_ttft_ms" in await answer.text()
    async with http.post("/generate", json=GENERATE, headers={"x-slo-tpot-ms": "fast"}) as answer:
        body = await answer.json()
    assert answer.status == 400
    assert body["error"]["message"] == ("x-slo-tpot-ms must be milliseconds above 0 and up to 86400000, not 'fast'.")


def test_a_body_is_stronger_than_a_header():
    token = HEADER_SLO.set(slo_of_headers({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "20"}))
    try:
        assert slo_of(None, None) == Slo(0.5, 0.02) and slo_of(250.0, None) == Slo(0.25, 0.02)
    finally:
        HEADER_SLO.reset(token)
    assert slo_of(None, 30.0) == Slo(None, 0.03)
    for text in ("nan", "-1", "1e99", ""):
        with pytest.raises(InvalidRequest):
            slo_of_headers({"x-slo-ttft-ms": text})
