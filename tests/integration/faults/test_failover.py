"""A decode server dies with prompts that have arrived and not been answered: another takes over, at no forward pass."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from baton.tests.helpers.harness import Cluster
from baton.tests.helpers.staged_pair import ARRIVED, Stages
from baton.tests.integration.faults.test_faults import until
from baton.tests.tinychat.tasks import held_out, matches

REQUESTS = 24


async def ask(url, example):
    body = {"model": "tinychat", "messages": example.messages, "temperature": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session, \
            session.post(url + "/v1/chat/completions", json=body) as answer:
        told = await answer.json()
        assert answer.status == 200, told
        assert matches(example, told["choices"][0]["message"]), told
        return told["usage"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", [(), pytest.param(("--pp-size", "2"), marks=pytest.mark.slow)], ids=["one", "stages"])
async def test_another_decode_server_answers_and_prefill_computes_nothing_again(tmp_path, shape):
    cluster = Cluster(tmp_path, decode=2, flags=["--kv-retain-seconds", "60"], prefill_flags=shape,
                      router_flags=["--policy", "round_robin"])
    stages, (victim, survivor), prefill = Stages(tmp_path), cluster.decode, cluster.prefill[0]
    victim.argv[2:3] = ["baton.tests.helpers.staged_pair", "decode"]
    victim.environment["BATON_STAGES"] = str(tmp_path)
    with cluster:
        stages.arm(ARRIVED)
        examples = held_out(REQUESTS, seed=91, tasks=("needle", "capitals", "sums"))
        tasks = [asyncio.ensure_future(ask(cluster.url, example)) for example in examples]
        try:
            await asyncio.to_thread(until, lambda: stages.reached, 120)
            # What it was sent so far lies there, and prefill has done with all of it.
            await asyncio.to_thread(until, lambda: prefill.state()["gauges"]["kv_prompts_retained"] > 3, 60)
            computed = prefill.state()["counters"]
            victim.kill()
        finally:
            stages.go()
        usages = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        reused = prefill.state()["counters"]["reused_prompts"]
        assert computed["reused_prompts"] == 0 and reused > 0
        whole = sum(usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] for usage in usages)
        assert whole >= reused
        for server in (prefill, survivor):
            server.assert_clean()
        assert prefill.state()["gauges"]["kv_transfers_draining"] == 0
        victim.start().wait_ready()
