"""Steps of a prefill server: small ones while few wait, so that nobody waits for a neighbour; large ones under load."""

from __future__ import annotations

import pytest

from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.req import Req
from baton.common.scheduler.batcher import Batcher
from baton.prefill.step_size import step_tokens


def steps(lengths, **args):
    """Tokens of each request in each step, until all are computed."""
    batcher = Batcher(KVCacheManager(4096, 16), ScheduleArgs(**args), decodes=False)
    for i, length in enumerate(lengths):
        message = Generate(str(i), [i] * length, SamplingParams(max_new_tokens=1))
        batcher.waiting.append(Req.from_message(message, eos_ids=frozenset(), now=float(i), timeout=1e9))
    found = []
    while batcher.waiting or batcher.prefilling:
        batch = batcher.next_prefill(step_tokens(batcher))
        found.append({int(chunk.req.rid): chunk.stop - chunk.start for chunk in batch.chunks})
        for chunk in batch.chunks:
            chunk.req.num_computed_tokens = chunk.stop
            if chunk.samples:
                batcher.prefilling.remove(chunk.req)
    return found


@pytest.mark.parametrize("lengths, expected", [
    ([4096, 4096, 4096], [{0: 4096}, {1: 4096}, {2: 4096}]),
    ([1024] * 4, [{0: 1024, 1: 1024}, {2: 1024, 3: 1024}]),
    ([100] * 3, [{0: 100, 1: 100, 2: 100}]),
    ([10000, 100], [{0: 8192}, {0: 1808, 1: 100}])])
def test_prompts_that_keep_a_gpu_busy_are_computed_one_after_the_other(lengths, expected):
    assert steps(lengths) == expected


def test_steps_are_large_while_many_wait():
    found = [sum(step.values()) for step in steps([1024] * 48)]
    assert found[0] == 6144 and found == sorted(found, reverse=True) and found[-1] <= 2048
    assert sum(found) == 48 * 1024
    assert [sum(step.values()) for step in steps([1024] * 48, max_prefill_tokens=3072)][0] == 3072
