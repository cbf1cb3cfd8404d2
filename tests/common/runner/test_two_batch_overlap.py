"""Steps in two halves: what is cut, how, and in which order the halves go on. test_dp.py has the tokens."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.server import DataParallelArgs, ParallelArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.token_exchange import TokenExchange
from baton.common.distributed.tp import TPGroup
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.models.decoder.micro_batches import run_interleaved
from baton.common.runner.dp_sync import DPSync
from baton.common.runner.two_batch_overlap import TwoBatchOverlap, slice_rows
from baton.tests.helpers.small_models import load_runner, server_config
from baton.tests.helpers.small_moe import save_moe

PAGE = 4
MIN_TOKENS = 100


def batch_of(parts: list[tuple[int, int]]):
    """Of requests with so many tokens before the step, and in it."""
    rng = np.random.default_rng(5)
    pages = rng.permutation(200)
    rows, used = [], 0
    for start, count in parts:
        rows.append(Row(rng.integers(0, 90, count).tolist(), start, pages[used:used + 40]))
        used += 40
    return rows, build_forward_batch(rows, PAGE, torch.device("cpu"))


@pytest.mark.parametrize("middle", [1, 6, 7, 8, 12, 21])
def test_rows_of_a_microbatch_are_a_batch(middle):
    rows, batch = batch_of([(0, 7), (9, 5), (3, 10)])
    for begin, end in ((0, middle), (middle, batch.num_tokens)):
        cut, first = [], 0
        for row in rows:
            ids = list(row.token_ids)
            low, high = max(begin - first, 0), min(end - first, len(ids))
            if low < high:
                cut.append(Row(ids[low:high], row.start + low, row.page_ids))
            first += len(ids)
        wanted = build_forward_batch(cut, PAGE, torch.device("cpu"))
        found = slice_rows(batch, begin, end, PAGE)
        for field in dataclasses.fields(wanted):
            one, other = getattr(found, field.name), getattr(wanted, field.name)
            if field.name not in ("logits_rows", "last_tokens"):
                assert np.array_equal(one, other) if one is not None else other is None, field.name


def test_microbatches_run_interleaved():
    told = []

    def work(name: str, steps: int):
        for step in range(steps):
            told.append(f"{name}{step}")
            yield
        return name

    assert run_interleaved([work("a", 2), work("b", 3)]) == ["a", "b"]
    assert told == ["a0", "b0", "a1", "b1", "b2"]


def agreed(*told: tuple[int, bool]):
    """The step of groups with these tokens, which decode or not."""
    dp = SimpleNamespace(gather_ints=lambda mine: np.array(
        [[tokens, min(tokens, 1), 0, decodes or not tokens] for tokens, decodes in told]))
    return DPSync(SimpleNamespace(dp=dp)).sync(*told[0], can_decode=False)


def split_of(*told: tuple[int, bool]) -> list[list[int]]:
    """Rows of the micro-batches in every group; empty where the step is not split."""
    exchange = TokenExchange(TPGroup(0, len(told)))
    return list(TwoBatchOverlap(None, (None, None), exchange, PAGE, 0, MIN_TOKENS).split_counts(agreed(*told)) or [])


def test_which_steps_are_split():
    many = 2 * MIN_TOKENS
    assert split_of((many, False), (many + 1, False)) == [[many // 2] * 2, [many // 2, many // 2 + 1]]
    assert split_of((many + 3, False), (0, False)) == [[many // 2, 1], [many // 2 + 3, 1]]
    assert not split_of((many, False), (1, True)), "a group decodes"
    assert not split_of((MIN_TOKENS - 1, False), (many, False))
    assert not split_of((2 * many, False), *[(0, False)] * 3), "parts would not be padded to the largest"


def test_what_does_not_go_together(tmp_path):
    with pytest.raises(ConfigError, match="needs --enable-dp-attention"):
        dataclasses.replace(server_config(tmp_path), data_parallel=DataParallelArgs(enable_two_batch_overlap=True))
    with pytest.raises(ConfigError, match="must be 4 or more"):
        DataParallelArgs(two_batch_min_tokens=3)
    config = server_config(tmp_path, tp=2)
    with pytest.raises(ConfigError, match="raise --chunked-prefill-size"):
        dataclasses.replace(config, data_parallel=DataParallelArgs(True, 2, enable_two_batch_overlap=True))
    with pytest.raises(ConfigError, match="does not work with --moe-a2a-backend peer: leave one of them out"):
        dataclasses.replace(config, data_parallel=DataParallelArgs(True, 2, enable_two_batch_overlap=True),
                            parallel=ParallelArgs(2, ep_size=2, moe_a2a_backend="peer"))
    save_moe(tmp_path, "Qwen3Moe")
    runner = load_runner(server_config(tmp_path), Parallel(experts=ExpertParallel(TPGroup(), 1, "alltoall")))
    with pytest.raises(ConfigError, match="is for --moe-a2a-backend none"):
        runner._enable_two_batch_overlap()
