"""Hidden states that a draft model reads: against transformers', and in every way in which steps are computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.common.attention.workspace import AttentionWorkspace
from baton.common.distributed.step_rows import ONE_GROUP
from baton.common.forward.forward_batch import build_forward_batch
from baton.common.forward.step_context import StepContext
from baton.common.runner.two_batch_overlap import TwoBatchOverlap
from baton.tests.common.models.test_models_numerics import TOLERANCE, tokens_of
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.replayed_prompts import record_again
from baton.tests.helpers.small_models import load_runner, row_of, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

MAKERS: dict[str, Any] = {
    "Llama": save_model, "Mistral": save_model, "Qwen2": save_model, "Qwen3": save_model, "Mixtral": save_moe,
    "Qwen2Moe": save_moe, "Qwen3Moe": save_moe, "GptOss": save_moe,
    "DeepseekV3": lambda folder, family: save_deepseek(folder, 3)}
WANTED = [(), (0, 2, 1), (1, 3), (2,)]


@torch.inference_mode()
def expected(model: Any, tokens: np.ndarray, layers: tuple[int, ...]) -> torch.Tensor:
    """transformers' states of layers that have another after them, and after the final norm."""
    states = model(torch.from_numpy(tokens)[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers] if layers else [states[-1][0]], -1)


def batch_of(runner: Any, parts: list[tuple[np.ndarray, int, np.ndarray]], wanted: list[int] | None = None) -> Any:
    return build_forward_batch([row_of(runner, *part) for part in parts], runner.layout.page_size, runner.device,
                               wanted)


def both(runner: Any, parts: list[Any], layers: tuple[int, ...], wanted: list[int] | None = None) -> Any:
    """The step's states and features, after a check of the former against a plain step's."""
    batch = batch_of(runner, parts, wanted)
    plain = runner.hidden_states(batch)
    with torch.inference_mode():
        states, features = runner._model.hidden_states_and_features(runner.plan(batch), layers)
    torch.testing.assert_close(states, plain, atol=0 if layers and max(layers) < 3 else TOLERANCE, rtol=0)
    return states, features


@pytest.mark.parametrize("family", MAKERS)
def test_features_equal_transformers(tmp_path, family):
    """Two prompts in chunks, and a decode step; the last layer is cut to its last rows or not."""
    model = MAKERS[family](tmp_path, family)
    runner = load_runner(server_config(tmp_path, page_size=4))
    prompts = [tokens_of(30), tokens_of(21)]
    pages = scattered_pages(runner, 2, 40)
    steps = [[(0, 0, 17), (1, 0, 9)], [(0, 17, 29), (1, 9, 20)], [(0, 29, 30), (1, 20, 21)]]
    for layers in [(), (0, 2, 1), (2,)]:
        want = [expected(model, prompt, layers) for prompt in prompts]
        for parts in steps:
            _, found = both(runner, [(prompts[b][start:stop], start, pages[b]) for b, start, stop in parts], layers)
            rows = torch.cat([want[b][start:stop] for b, start, stop in parts])
            torch.testing.assert_close(found, rows, atol=TOLERANCE, rtol=0)


def test_states_before_the_final_norm(tmp_path):
    save_model(tmp_path, "Llama")
    runner = load_runner(server_config(tmp_path))
    tokens, pages = tokens_of(20), scattered_pages(runner, 1, 40)[0]
    states, features = both(runner, [(tokens, 0, pages)], (3, 0), list(range(20)))
    torch.testing.assert_close(runner._model.norm(features[:, :48].contiguous()), states)
    assert torch.equal(features[:, 48:], runner._model.embed_tokens.embed(torch.from_numpy(tokens)))


def alone(partial: Any, x: torch.Tensor, rows: Any) -> Any:
    """An exchange of one attention group."""
    yield
    return partial(x, rows)


@pytest.mark.parametrize("layers", WANTED)
def test_pieces_and_microbatches_have_the_same_features(tmp_path, layers):
    save_moe(tmp_path, "Qwen3Moe")
    runner = load_runner(server_config(tmp_path, page_size=4))
    pages = scattered_pages(runner, 2, 40)
    parts = [(tokens_of(30), 0, pages[0]), (tokens_of(21), 0, pages[1])]
    states, want = both(runner, parts, layers)
    workspace = AttentionWorkspace(runner.device)
    exchange = SimpleNamespace(step=lambda counts: ONE_GROUP, apply_partial_overlapped=alone)
    halves = TwoBatchOverlap(runner._attention, (workspace, workspace.fork()), exchange, 4, 0, 1)
    batch = batch_of(runner, parts)
    with torch.inference_mode():
        runner._model.trims_last_layer = False  # as with data-parallel attention, which micro-batches need
        split = halves.plan(batch, ([24], [27]))
        step = StepContext(batch, split[-1].step.attention, microbatches=split)
        found = runner._model.hidden_states_and_features(step, layers)
    torch.testing.assert_close(found, (states, want), atol=TOLERANCE, rtol=0)
    replayed = record_again(runner, [64])
    found = both(runner, parts, layers)
    torch.testing.assert_close(found, (states, want), atol=TOLERANCE, rtol=0)
    assert replayed, "the step ran in pieces"
