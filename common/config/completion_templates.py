"""Forms in which code models get what stands before and after the text to fill in, by their names in SGLang.

The tokens are those of the models' own cards: DeepSeek-Coder, StarCoder, Qwen2.5-Coder.
"""

from __future__ import annotations

COMPLETION_TEMPLATES = {
    "deepseek_coder": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "star_coder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "qwen_coder": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
}
