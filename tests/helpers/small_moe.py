"""Small random mixtures of experts, saved by transformers; shared by the tests of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.tests.helpers.gpt_oss_models import GPT_OSS
from baton.tests.helpers.small_models import save_model

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
                 "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
                 "norm_topk_prob": True},
    "GptOss": GPT_OSS,
}


def save_moe(folder: Path, family: str, **changes: Any) -> Any:
    """As ``save_model``, of a mixture of experts."""
    return save_model(folder, family, **{**FAMILIES[family], **changes})
