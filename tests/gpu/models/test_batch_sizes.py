"""Decode steps of real layers' widths at the limits between kernels: in CUDA graphs, padded or not, and launched one by
one, a row's logits are near what a step of many rows gives it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.common.forward.forward_batch import ForwardBatch, Row, build_forward_batch, model_input
from baton.tests.bench.mla_decode import V2_LITE
from baton.tests.gpu.models.test_models import LLAMA_8B
from baton.tests.helpers.small_models import load_runner, scattered_pages, server_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHORT = {"num_hidden_layers": 2, "vocab_size": 2048, "max_position_embeddings": 256}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA_8B | SHORT | {"eos_token_id": 1},
    "latents": V2_LITE | SHORT | {"bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 2},
}
CAPTURED = (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 160, 224, 225, 256)
ROWS = (1, 2, 3, 8, 9, 16, 17, 31, 33, 34, 40, 64, 65, 66, 100, 127, 128, 129, 130, 200, 224, 225, 230, 256)
MOST = 270


@pytest.mark.parametrize("shape,quantization,most", [("8b", None, 0.05), ("8b", "fp8", 0.2),
                                                     ("8b", "fp8_per_block", 0.2), ("latents", None, 0.05)])
def test_rows_do_not_depend_on_how_many_there_are(tmp_path, shape, quantization, most):
    """``most``: a rounding otherwise may turn a value to the next of float8, an eighth away."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    kernels = KernelArgs("triton", cuda_graph_bs=CAPTURED, disable_piecewise_cuda_graph=True)
    config = server_config(tmp_path, dtype="bfloat16", load_format="dummy", quantization=quantization,
                           max_total_tokens=16 * 5 * MOST)
    runner = load_runner(dataclasses.replace(config, kernels=kernels), device="cuda:0")
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(2, 2048, (MOST, 65)), rng.integers(1, 64, MOST)
    pages = scattered_pages(runner, MOST, 65)
    runner.forward(batch_of(runner, [Row(tokens[i, :lengths[i]], 0, pages[i]) for i in range(MOST)]))
    steps = [Row(tokens[i, lengths[i]:lengths[i] + 1], lengths[i], pages[i]) for i in range(MOST)]
    wanted = runner.forward(batch_of(runner, steps)).clone()
    assert wanted.isfinite().all() and wanted.std() > 0
    for rows in ROWS:
        eager = runner.forward(batch_of(runner, steps[:rows])).clone()
        assert runner._decode_graphs.size_for(rows) is not None
        logits, likeliest, _ = runner.step(model_input(steps[:rows], runner.layout.page_size))
        assert torch.equal(likeliest, logits.argmax(-1))
        for way, found in (("launched", eager), ("a graph's", logits.float())):
            errors = (found - wanted[:rows]).norm(dim=-1) / wanted[:rows].norm(dim=-1)
            assert errors.max() < most and errors.median() < most / 2, (way, rows, errors)


def batch_of(runner, rows: list[Row]) -> ForwardBatch:
    return build_forward_batch(rows, runner.layout.page_size, runner.device)
