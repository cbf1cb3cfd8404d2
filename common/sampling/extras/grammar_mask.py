"""Grammar masks: apply masks of allowed tokens, one bit a token, to logits."""

from __future__ import annotations

import torch

from ...forward.host_copies import upload
from ...request.extras import EXTRAS, Extra, Members
from ...request.sampling_metadata import nothing_allowed

_UNPACKED_ROWS = 32
"""Rows that are unpacked at once: one of a 128k vocabulary takes 1 MB of shifted words."""


def num_words(vocab_size: int) -> int:
    """Returns the number of int32 words of one row's mask."""
    return -(vocab_size // -32)


def apply_token_bitmask(logits: torch.Tensor, members: Members, previous: torch.Tensor | None = None) -> dict[int, str]:
    """Sets the logits [R, vocab] of tokens that a member's FillAllowed rules out to -inf, in place; calls each once, on
    the host, after the forward pass has been launched. Rows that nothing can follow fail."""
    failed = {row: "Nothing can follow in this grammar." for row, fill in members if fill is nothing_allowed}
    if failed:
        members = [member for member in members if member[0] not in failed]
    vocab_size = logits.shape[-1]
    bitmask = torch.full((len(members), num_words(vocab_size)), -1, dtype=torch.int32, pin_memory=logits.is_cuda)
    for i, (_, fill) in enumerate(members):
        fill(bitmask, i)
    words = bitmask.to(logits.device, non_blocking=True)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    index = upload([row for row, _ in members], torch.int64, logits.device)
    for start in range(0, len(members), _UNPACKED_ROWS):
        chunk = slice(start, start + _UNPACKED_ROWS)
        forbidden = ((words[chunk, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab_size]
        logits[index[chunk]] = logits[index[chunk]].masked_fill_(forbidden, float("-inf"))
    return failed


GRAMMAR_MASK = EXTRAS.register("grammar")(Extra(
    frozenset(("grammar", "matcher")), lambda req: req.sampling.grammar is not None, 10,
    lambda req, state: state.allowed, apply_token_bitmask))
