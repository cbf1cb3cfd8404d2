"""A model's last layer computes keys and values of all rows, and beyond them only the rows that need logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.tests.common.models.test_models_numerics import TOLERANCE, tokens_of
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.small_models import load_runner, row_of, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

MAKERS = {"Llama": save_model, "Qwen3": save_model, "Qwen3Moe": save_moe,
          "DeepSeek": lambda folder, family: save_deepseek(folder, 3)}
CPU = torch.device("cpu")


@pytest.fixture(params=MAKERS)
def runner(tmp_path, request):
    MAKERS[request.param](tmp_path, request.param)
    return load_runner(server_config(tmp_path))


def computed_rows(runner, monkeypatch) -> list[int]:
    """Rows that the last layer's second norm gets, from now on."""
    seen: list[int] = []
    norm = runner._model.layers[-1].mlp_norm
    inner = norm.add_norm_as

    def add_norm_as(format_of, x, residual, rows):
        seen.append(len(residual))
        return inner(format_of, x, residual, rows)

    monkeypatch.setattr(norm, "add_norm_as", add_norm_as)
    return seen


def stored(runner) -> list[torch.Tensor]:
    return [group[:-1].clone() for group in runner.pool.groups]


def test_prompts_over_a_prefix_need_the_rows_with_logits(runner, monkeypatch):
    """Three prompts in two chunks: the first has all of the first and third and a part of the second, whose rest comes
    with a request that decodes. Logits and what the pool holds are those of a pass that computes every row."""
    prompts = [tokens_of(30), tokens_of(45), tokens_of(21), tokens_of(17)]
    pages = scattered_pages(runner, 4, 64)
    steps = [([(3, 0, 16)], []),
             ([(0, 0, 30), (1, 0, 20), (2, 0, 21)], [29, 70]),
             ([(1, 20, 45), (3, 16, 17)], [24, 25])]
    found = []
    for whole in (False, True):
        for group in runner.pool.groups:
            group.zero_()
        seen = computed_rows(runner, monkeypatch)
        logits = []
        for parts, wanted in steps:
            rows = [row_of(runner, prompts[b][start:stop], start, pages[b]) for b, start, stop in parts]
            total = sum(row.num_tokens for row in rows)
            batch = build_forward_batch(rows, 16, CPU, list(range(total)) if whole else wanted)
            logits.append(runner.forward(batch)[wanted] if whole else runner.forward(batch))
        assert seen == ([16, 71, 26] if whole else [2, 2])
        found.append((logits, stored(runner)))
    (got, got_pages), (want, want_pages) = found
    assert [len(rows) for rows in got] == [0, 2, 2]
    for ours, theirs in zip(got + got_pages, want + want_pages):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_what_ends_attend_to():
    """Rows 0, 3 and 4 are ends of requests of 1, 3 and 1 rows; the second has a page before and fills a third."""
    rows = [Row([5], 0, np.array([7])), Row([6, 7, 8], 2, np.array([3, 1, 2])), Row([9], 4, np.array([4, 5, 6]))]

    def ends_of(wanted: list[int] | None):
        return build_forward_batch([*rows, Row(range(8), 0, np.arange(10, 14))], 2, CPU, wanted).last_tokens

    ends = ends_of([3, 4])
    assert ends is not None and ends.is_decode and ends.num_reqs == ends.num_tokens == 2
    assert ends.positions.tolist() == [4, 4] and ends.input_ids.tolist() == [8, 9]
    assert ends.page_of_token.tolist() == [2, 6] and ends.offset_in_page.tolist() == [0, 0]
    assert ends.kv_indptr.tolist() == ends.kv_indptr_cpu.tolist() == [0, 3, 6]
    assert ends.kv_indices.tolist() == ends.kv_indices_cpu.tolist() == [3, 1, 2, 4, 5, 6]
    assert ends.kv_last_page_len.tolist() == ends.kv_last_page_len_cpu.tolist() == [1, 1]
    ends = ends_of([0, 4])
    assert ends is not None and ends.kv_indices.tolist() == [7, 4, 5, 6]
    ends = ends_of(None)
    assert ends is not None and ends.num_reqs == 4 and ends.kv_indices_cpu[-4:].tolist() == [10, 11, 12, 13]
    ends = ends_of([])
    assert ends is not None and ends.num_reqs == 0


@pytest.mark.parametrize("wanted", [[2], [0, 2], [3, 0], [0, 0, 3], list(range(5))])
def test_other_rows_are_no_ends(wanted):
    """Rows in the middle of a request (prompt logprobs), and orders that nobody asks for."""
    rows = [Row([5], 0, np.array([7])), Row([6, 7, 8], 2, np.array([3, 1, 2])), Row([9], 4, np.array([4, 5, 6]))]
    assert build_forward_batch(rows, 2, CPU, wanted).last_tokens is None


def test_a_decode_step_has_no_ends():
    rows = [Row([5], 0, np.array([7])), Row([9], 4, np.array([4, 5, 6]))]
    assert build_forward_batch(rows, 2, CPU).last_tokens is None
