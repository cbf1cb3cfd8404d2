"""Small random gpt-oss models, saved by transformers; shared by the tests that compare with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.tests.helpers.small_models import save_model

WINDOW = 16
GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
    "sliding_window": WINDOW, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64},
}


def save_gpt_oss(folder: Path, **changes: Any) -> Any:
    """As ``save_model``: windows in the first and third of four layers. No value comes near the clamps."""
    return save_model(folder, "GptOss", **{**GPT_OSS, **changes})
