"""What a draft's config.json tells of its kind where its weights are not there yet: on the hub, or dummies."""

from __future__ import annotations

import json

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import build
from baton.common.config.draft_kind import check_draft
from baton.common.config.server import ServerConfig
from baton.common.models.registry import load_model_spec


def check(folder, algorithm: str, **values) -> None:
    (folder / "config.json").write_text(json.dumps(values))
    config = build(ServerConfig, {"model_path": "tinychat", "speculative_algorithm": algorithm,
                                  "speculative_draft_model_path": str(folder)})
    check_draft(config, load_model_spec(config.model))


LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("algorithm, values", [
    ("EAGLE", LLAMA), ("EAGLE3", LLAMA), ("STANDALONE", LLAMA), ("EAGLE", {"architectures": ["LlamaForCausalLMEagle"]}),
    ("EAGLE3", {**LLAMA, "draft_vocab_size": 9}), ("EAGLE", {**LLAMA, "num_nextn_predict_layers": 1}),
    ("NEXTN", {**LLAMA, "num_nextn_predict_layers": 1}), ("STANDALONE", {**LLAMA, "num_nextn_predict_layers": 1}),
    ("EAGLE3", {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 8}})])
def test_what_may_fit_is_loaded(tmp_path, algorithm, values):
    check(tmp_path, algorithm, **values)


@pytest.mark.parametrize("algorithm, values, fitting", [
    ("EAGLE", {**LLAMA, "draft_vocab_size": 9}, "EAGLE3"),
    ("STANDALONE", {**LLAMA, "eagle_config": {"a": 1}}, "EAGLE3"),
    ("NEXTN", {"architectures": ["Eagle3LlamaForCausalLM"]}, "EAGLE3"),
    ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle"]}, "EAGLE"),
    ("EAGLE3", {**LLAMA, "num_nextn_predict_layers": 1}, "STANDALONE")])
def test_what_cannot_fit_is_refused(tmp_path, algorithm, values, fitting):
    with pytest.raises(ConfigError, match=f" {algorithm} does not read: set --speculative-algorithm {fitting}"):
        check(tmp_path, algorithm, **values)


def test_broken_files_are_left_to_loading(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"not json")
    check(tmp_path, "EAGLE", **LLAMA)
