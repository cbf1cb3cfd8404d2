"""Prompts of ``/generate`` that consist of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...api.errors import InvalidRequest
from ...api.wire import Float32

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
