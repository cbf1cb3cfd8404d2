"""Heads of reward models, over transformers' hidden states of the same weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages, server_config


def rename(folder, architecture: str, tensors: dict[str, torch.Tensor], **changes) -> None:
    """Makes the checkpoint in ``folder`` one of ``architecture``, with ``tensors`` in the place of its LM head;
    ``changes`` of its configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes | {"architectures": [architecture]}))
    stored = load_file(folder / "model.safetensors")
    stored.pop("lm_head.weight", None)
    save_file(stored | tensors, folder / "model.safetensors")


def states_of(folder, tokens):
    """Returns the runner of ``folder``, and its last hidden state of ``tokens``."""
    runner = load_runner(server_config(folder, is_embedding=True))
    pages = scattered_pages(runner, 1, len(tokens))[0]
    batch = build_forward_batch([Row(tokens, 0, pages)], runner.layout.page_size, runner.device, [len(tokens) - 1])
    return runner, runner.hidden_states(batch)


@pytest.mark.parametrize("architecture,labels", [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_qwen2_scores_by_two_layers(tmp_path, architecture, labels):
    model, tokens = save_model(tmp_path, "Qwen2"), np.random.default_rng(0).integers(0, 131, 30)
    head = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, labels))
    rename(tmp_path, architecture, {f"score.{name}": tensor.clone() for name, tensor in head.state_dict().items()})
    runner, hidden = states_of(tmp_path, tokens)
    with torch.inference_mode():
        want = head(model.model(torch.from_numpy(tokens)[None]).last_hidden_state[:, -1])
    assert runner.spec.num_labels == labels
    torch.testing.assert_close(runner.classify(hidden), want, atol=1e-4, rtol=0)


def test_llama_weights_the_scores_of_attributes(tmp_path):
    model, tokens = save_model(tmp_path, "Llama"), np.random.default_rng(0).integers(0, 131, 30)
    linears = [torch.nn.Linear(48, size) for size in (48, 48, 3)]
    weights = torch.nn.Sequential(linears[0], torch.nn.SELU(), linears[1], torch.nn.SELU(), linears[2])
    score = torch.nn.Linear(48, 6, bias=False)
    rename(tmp_path, "LlamaForSequenceClassificationWithNormal_Weights", {
        "score.weight": score.weight.detach().clone(),
        **{f"weights.fc.{name}": tensor.clone() for name, tensor in weights.state_dict().items()}}, num_labels=6)
    runner, hidden = states_of(tmp_path, tokens)
    with torch.inference_mode():
        last = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[:, -1]
        want = (score(last).view(1, 3, 2)[..., 0] * weights(last)).sum(-1, keepdim=True)
    assert runner.spec.num_labels == 1
    torch.testing.assert_close(runner.classify(hidden), want, atol=1e-4, rtol=0)


def test_llama_as_an_embedding_model(tmp_path):
    model, tokens = save_model(tmp_path, "Llama"), np.random.default_rng(0).integers(0, 131, 30)
    rename(tmp_path, "LlamaEmbeddingModel", {})
    runner, hidden = states_of(tmp_path, tokens)
    with torch.inference_mode():
        want = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[:, -1]
    torch.testing.assert_close(runner.classify(hidden), want, atol=1e-4, rtol=0)
