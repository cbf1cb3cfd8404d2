"""Token bitmasks: applies masks of allowed tokens, one bit a token, to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..forward.host_copies import upload
from ..request.sampling_metadata import SamplingMetadata

_UNPACKED_ROWS = 32
"""Rows that are unpacked at once: one of a 128k vocabulary takes 1 MB of shifted words."""


def num_words(vocab_size: int) -> int:
    """Returns the number of int32 words of one row's mask."""
    return -(vocab_size // -32)


def apply_token_bitmask(logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Sets the logits [R, vocab] of tokens that a row's ``allowed`` rules out to -inf, in place; calls each once."""
    masked = [row for row, metadata in enumerate(rows) if metadata.allowed is not None]
    if not masked:
        return
    vocab_size = logits.shape[-1]
    bitmask = torch.full((len(masked), num_words(vocab_size)), -1, dtype=torch.int32,
                         pin_memory=logits.is_cuda)
    for i, row in enumerate(masked):
        fill = rows[row].allowed
        assert fill is not None
        fill(bitmask, i)
    words = bitmask.to(logits.device, non_blocking=True)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    index = upload(masked, torch.int64, logits.device)
    for start in range(0, len(masked), _UNPACKED_ROWS):
        chunk = slice(start, start + _UNPACKED_ROWS)
        forbidden = ((words[chunk, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab_size]
        logits[index[chunk]] = logits[index[chunk]].masked_fill_(forbidden, float("-inf"))
