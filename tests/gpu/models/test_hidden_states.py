"""What embedding servers and layers of multi-token prediction compute on a GPU: hidden states, as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.runner.cuda_graphs.piecewise_graphs import GraphRecorder, GraphSizes
from baton.tests.common.runner.mtp_rank import rows_by_chunks, with_layers
from baton.tests.helpers.deepseek_models import save_with_predictors
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages, server_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def runner_of(folder, device: str, **model):
    return load_runner(server_config(folder, backend="auto", dtype="float32", **model), device=device)


def draft_runner_of(folder, device: str):
    return load_runner(with_layers(server_config(folder, backend="auto", dtype="float32")), device=device)


def test_embeddings_equal_the_cpus(tmp_path):
    """Of whole prompts and a chunk behind one, launched one by one and by graphs in pieces; nothing decodes."""
    save_model(tmp_path, "Qwen3", head_dim=64)
    tokens = np.random.default_rng(1).integers(0, 90, (3, 70))

    def states(runner) -> list[torch.Tensor]:
        pages = scattered_pages(runner, 3, 70)
        found = []
        for parts in ([(0, 0, 13), (1, 0, 40)], [(2, 0, 60)], [(0, 13, 50)]):
            rows = [Row(tokens[req, start:stop], start, pages[req]) for req, start, stop in parts]
            count = sum(row.num_tokens for row in rows)
            for wanted in (None, list(range(count))):  # a prompt's last token, and all to average over
                batch = build_forward_batch(rows, runner.layout.page_size, runner.device, wanted)
                found.append(runner.hidden_states(batch).float().cpu())
        return found

    wanted = states(runner_of(tmp_path, "cpu", is_embedding=True))
    runner = runner_of(tmp_path, "cuda:0", is_embedding=True)
    assert runner._decode_graphs is None
    runner.prefill_graphs.release()
    ways = [states(runner)]
    runner.prefill_graphs.record(GraphSizes([16, 48, 64], 64), GraphRecorder(runner.device),
                                 lambda what, share: None)
    ways += [states(runner), states(runner)]
    for found in ways:
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [38, 11])
def test_predictors_equal_the_cpus(tmp_path, chunk):
    save_with_predictors(tmp_path, 2)
    rows = [rows_by_chunks(runner, chunk).float().cpu()
            for runner in (draft_runner_of(tmp_path, device) for device in ("cpu", "cuda:0"))]
    torch.testing.assert_close(rows[1], rows[0], atol=1e-3, rtol=1e-3)
