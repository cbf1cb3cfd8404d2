"""Prompts in pieces of recorded sizes compute what whole steps do. test_tp.py and test_dp.py have several ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.engine.forward_batch import Row, build_forward_batch
from baton.common.engine.prefill_graphs import PrefillGraphs, default_sizes
from baton.tests.common.deepseek_models import save_deepseek
from baton.tests.common.prompts_again import record_again
from baton.tests.common.small_models import load_runner, save_model, scattered_pages, server_config
from baton.tests.common.small_moe import save_moe

SIZES = [16, 48, 64]


def save(folder, family: str) -> None:
    if family.startswith("Deepseek"):
        save_deepseek(folder, int(family[-1]))
    elif family.endswith("Moe"):
        save_moe(folder, family)
    else:
        save_model(folder, family)


def steps_of(runner, tokens: np.ndarray, told: list | None = None) -> list[torch.Tensor]:
    """Logits of chunks of three prompts, of which one ends in each step, and of a decode step behind them."""
    pages = scattered_pages(runner, 3, 70)
    steps = [([(0, 0, 13)], None), ([(0, 13, 40), (1, 0, 9), (2, 0, 12)], None), ([(2, 12, 60)], None),
             ([(1, 9, 50)], []), ([(1, 50, 57)], list(range(7)))]
    found = []
    for parts, wanted in steps:
        rows = [Row(tokens[req, start:stop], start, pages[req]) for req, start, stop in parts]
        batch = build_forward_batch(rows, runner.layout.page_size, runner.device, False, wanted)
        groups: list[int] = []
        found.append(runner.forward(batch, lambda group, event: groups.append(group)).clone())  # noqa: B023
        assert groups == list(range(len(runner.layout.groups)))
    rows = [Row(tokens[req, 60:61], 60 if req else 40, pages[req]) for req in (0, 2)]
    return [*found, runner.forward(build_forward_batch(rows, runner.layout.page_size, runner.device, True))]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe", "DeepseekV2"])
def test_pieces_equal_whole_steps(tmp_path, family):
    """Padded and not, over prefixes and in the middle of prompts; rows of padding have what steps before left there."""
    save(tmp_path, family)
    runner = load_runner(server_config(tmp_path, page_size=4, num_layer_groups=3))
    tokens = np.random.default_rng(1).integers(0, 90, (3, 70))
    whole = steps_of(runner, tokens)
    replayed = record_again(runner, SIZES)
    found = steps_of(runner, tokens)
    layers = runner.spec.num_layers
    assert replayed == [size for size in (16, 48, 48, 48, 16) for _ in range(layers)]
    for mine, wanted in zip(found, whole):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
    assert [len(logits) for logits in found] == [1, 3, 1, 0, 7, 2]


def test_sizes():
    assert default_sizes(100) == [32, 64, 100]
    sizes = default_sizes(8192)
    assert sizes[:9] == [32, 64, 128, 192, 256, 320, 384, 448, 512] and sizes[-1] == 8192
    assert all(after <= 1.25 * before for before, after in zip(sizes[4:], sizes[5:]))
    assert default_sizes(1100)[-2:] == [1024, 1100]


def test_which_steps_are_recorded():
    graphs = PrefillGraphs.__new__(PrefillGraphs)
    graphs._sizes = [64, 256, 512, 1024]
    assert [graphs.size_for([count]) for count in (1, 64, 65, 257, 410, 512, 513, 820, 1024, 1025)] == [
        64, 64, 256, None, 512, 512, None, 1024, 1024, None]
    assert graphs.size_for([200, 1]) == 256 and graphs.size_for([1000, 900]) == 1024
    assert graphs.size_for([1000, 1]) is None, "a step of one group would be padding for the other"
