"""The name of the tokenizer that a benchmark's prompts are made with."""

from __future__ import annotations

from ..api.errors import ConfigError
from .client.control import Control
from .serving_args import TargetArgs


def tokenizer_name(target: TargetArgs, control: Control) -> str:
    """``--tokenizer``'s, or the one of the model that the server names. Raises ConfigError where it names none."""
    if target.tokenizer is not None:
        return target.tokenizer
    info, model = control.model_info(), control.model()
    name = info.get("tokenizer_path") or info.get("model_path") or model.get("root") or target.model or model.get("id")
    if name is None:
        raise ConfigError("The server names no model; give --tokenizer.")
    return str(name)
