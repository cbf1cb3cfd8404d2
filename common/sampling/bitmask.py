"""Masks of allowed tokens, one bit a token, applied to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..forward.host_copies import upload
from ..request.sampling_metadata import SamplingMetadata

# Unpacked, a row of a 128k vocabulary is 1 MB of shifted words: 32 rows at once are all the memory it shall take.
_ROWS_AT_ONCE = 32


def num_words(vocab_size: int) -> int:
    """int32 words of one row's mask."""
    return -(vocab_size // -32)


def forbid_unallowed(logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Set the logits [R, vocab] of tokens that a row's ``allowed`` rules out to -inf, in place; calls each once."""
    masked = [row for row, choosing in enumerate(rows) if choosing.allowed is not None]
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
    for start in range(0, len(masked), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        forbidden = ((words[some, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab_size]
        logits[index[some]] = logits[index[some]].masked_fill_(forbidden, float("-inf"))
