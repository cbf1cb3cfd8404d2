"""The text models within checkpoints of models that read images, against the same text models alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.models.registry import load_model_spec
from baton.tests.helpers.family_parity import check_greedy, save_random
from baton.tests.helpers.repacked_models import Tensors, change_config, repack
from baton.tests.helpers.small_models import server_config

MROPE = {"type": "mrope", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Text", {"head_dim": 16, "sliding_window": 24}),
    "Mistral": ("Mistral3ForConditionalGeneration", "Mistral", {"sliding_window": None}),
    "Qwen2": ("Qwen2_5_VLForConditionalGeneration", "Qwen2", {}),
    "Qwen3": ("Qwen3VLForConditionalGeneration", "Qwen3", {"head_dim": 12}),
}


def into_whole(folder: Path, architecture: str, prefix: str, **text: Any) -> None:
    """Makes a checkpoint of a text model one of a model that reads images."""
    config = {**json.loads((folder / "config.json").read_text()), **text}

    def change(tensors: Tensors) -> Tensors:
        named = {name.replace("model.", prefix, 1) if name.startswith("model.") else name: tensor
                 for name, tensor in tensors.items()}
        return {**named, "model.visual.patch_embed.weight": torch.ones(2, 2), "vision_tower.patch.bias": torch.ones(2)}

    repack(folder, change, {"architectures": [architecture], "text_config": config},
           drop=tuple(name for name in config if name not in ("dtype", "eos_token_id")))
    change_config(folder, {"architectures": [architecture]})


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_text_model_s(tmp_path, name, prefix):
    """Newer and older names of tensors; those that read images are left out."""
    architecture, config_name, config = CASES[name]
    model = save_random(tmp_path, name, config_name=config_name, **config)
    into_whole(tmp_path, architecture, prefix)
    check_greedy(tmp_path, model, 131)


def test_positions_of_texts_are_plain_ones(tmp_path):
    """Qwen2-VL states M-RoPE, first without a configuration of the text model."""
    model = save_random(tmp_path, "Qwen2")
    repack(tmp_path, lambda tensors: {**tensors, "visual.patch.weight": torch.ones(2)}, {
        "architectures": ["Qwen2VLForConditionalGeneration"], "rope_scaling": MROPE}, drop=("rope_parameters",))
    check_greedy(tmp_path, model, 131)


def test_a_text_config_that_is_none_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": None}))
    with pytest.raises(ConfigError, match="text_config must be an object, not None"):
        load_model_spec(server_config(tmp_path).model)
