"""Reasoning formats by SGLang's names."""

from __future__ import annotations

from ..tools.kimi_k2 import ALL_BEGIN
from .format import ReasoningFormat

REASONING: dict[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(always=True),
    "deepseek-v3": ReasoningFormat(),
    "glm45": ReasoningFormat(),
    "gpt-oss": ReasoningFormat(harmony=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(interrupters=(ALL_BEGIN,)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "qwen3": ReasoningFormat(),
    "qwen3-thinking": ReasoningFormat(always=True),
}
