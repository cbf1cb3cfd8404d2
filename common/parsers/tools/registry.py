"""The formats of tool calls by SGLang's names, and their detection in a chat template."""

from __future__ import annotations

from .deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from .format import ToolFormat
from .glm45 import GLM45
from .gpt_oss import GPT_OSS
from .hermes import HERMES
from .kimi_k2 import KIMI_K2
from .llama3 import LLAMA3
from .mistral import MISTRAL
from .pythonic import PYTHONIC
from .qwen3_coder import QWEN3_CODER

FORMATS: dict[str, ToolFormat] = {
    "gpt-oss": GPT_OSS, "kimi_k2": KIMI_K2, "deepseekv3": DEEPSEEK_V3, "deepseekv31": DEEPSEEK_V31, "glm45": GLM45,
    "glm": GLM45, "glm47": GLM45, "qwen3_coder": QWEN3_CODER, "mistral": MISTRAL, "qwen25": HERMES,
    "qwen": HERMES, "hermes": HERMES, "llama4": PYTHONIC, "pythonic": PYTHONIC, "llama3": LLAMA3,
}
"""The formats, in the order in which ``detect`` tries them: a template may contain the signs of a later format, too."""


def detect(template: str) -> str | None:
    """The name of the format that a chat template's source describes, None where it is unknown."""
    for name, tool_format in FORMATS.items():
        if any(all(word in template for word in words) for words in tool_format.signs):
            return name
    return None
