"""Further features of ``/generate``: prompts of embeddings, custom logit processors, hidden states."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...api.errors import InvalidRequest
from ...api.messages import CustomProcessor
from ...api.wire import Float32

MAX_HIDDEN_BYTES = 32 << 20  # of one answer; with it a prefill server's result stays below its 64 MiB
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

Embeddings = list[list[Float32 | list[Float32]]]
"""One prompt, ``[n, hidden]``, or a batch of them."""


@dataclass(frozen=True)
class EmbeddedPrompts:
    """Each prompt as float32 rows (little endian) and their number. ``batched``: the request held a list of prompts."""

    rows: list[bytes]
    counts: list[int]
    batched: bool


def embedded_prompts(given: Embeddings, hidden_size: int) -> EmbeddedPrompts:
    """Raises InvalidRequest for what is not a prompt of ``hidden_size`` wide rows, or a list of such."""
    batched = any(isinstance(value, list) for row in given for value in row)
    prompts: list[Any] = given if batched else [given]
    arrays = [_array(prompt, hidden_size) for prompt in prompts]
    return EmbeddedPrompts([array.tobytes() for array in arrays], [len(array) for array in arrays], batched)


def _array(prompt: Any, hidden_size: int) -> np.ndarray:
    """``[n, hidden_size]`` float32"""
    try:
        with np.errstate(over="ignore"):
            array = np.array(prompt, "<f4")
    except (ValueError, TypeError):  # rows of unequal length
        array = np.empty((0, 0), "<f4")
    if array.ndim != 2 or not len(array) or array.shape[1] != hidden_size:
        raise InvalidRequest(f"input_embeds must hold at least one row of {hidden_size} numbers, the model's hidden "
                             "size, for each prompt, and rows only.", param="input_embeds")
    if not np.isfinite(array).all():
        raise InvalidRequest("input_embeds must hold numbers that fit float32.", param="input_embeds")
    return array


def custom_processor(given: str | None, params: dict[str, Any] | None) -> CustomProcessor | None:
    """None where there is none; raises InvalidRequest for what is no import path."""
    if not given:
        return None
    if given.lstrip().startswith("{"):
        raise InvalidRequest(
            "custom_logit_processor must be an import path like 'package.module:Name': this server unpickles nothing, "
            'so a serialized {"callable": ...} is refused; install the class on the server and name it.',
            param="custom_logit_processor")
    if len(given) > 512 or not _IMPORT_PATH.fullmatch(given):
        raise InvalidRequest(f"custom_logit_processor must be an import path like 'package.module:Name', got "
                             f"{given[:80]!r}.", param="custom_logit_processor")
    try:
        msgspec.msgpack.encode(params)
    except (OverflowError, RecursionError):
        raise InvalidRequest("custom_params must hold integers of 64 bits at most, and not be nested too deeply.",
                             param="sampling_params.custom_params") from None
    return CustomProcessor(given, params or {})


def check_hidden_bytes(num_tokens: int, hidden_size: int) -> None:
    """Raises InvalidRequest where the states of prompt and output together are too many."""
    most = MAX_HIDDEN_BYTES // (4 * hidden_size)
    if num_tokens > most:
        raise InvalidRequest(f"return_hidden_states goes with {most} tokens of prompt and output at most on this model "
                             f"(32 MiB), the request has {num_tokens}; shorten the prompt or lower max_new_tokens.",
                             param="return_hidden_states")


def state_lists(states: bytes, num_prompt_tokens: int, hidden_size: int) -> list[Any]:
    """SGLang's form: the prompt's states ``[n, hidden]`` first, then one ``[hidden]`` for each decode step."""
    rows = np.frombuffer(states, "<f4").reshape(-1, hidden_size).tolist()
    return [rows[:num_prompt_tokens], *rows[num_prompt_tokens:]]
