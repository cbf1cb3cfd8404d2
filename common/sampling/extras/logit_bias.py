"""Logit bias: adds the values of requests to the logits of single tokens."""

from __future__ import annotations

import torch

from ...forward.host_copies import upload, upload_joined
from ...request.extras import EXTRAS, Extra, Members


def add_bias(logits: torch.Tensor, members: Members, previous: torch.Tensor | None = None) -> dict[int, str]:
    """Adds the LogitBias of each member to its row of ``logits`` [R, vocab], in place."""
    rows, biases = zip(*members)
    ids = upload_joined([bias.ids for bias in biases], torch.int64, logits.device)
    values = upload_joined([bias.values for bias in biases], torch.float32, logits.device)
    sizes = upload([len(bias.ids) for bias in biases], torch.int64, logits.device)
    index = upload(rows, torch.int64, logits.device).repeat_interleave(sizes, output_size=len(ids))
    logits[index, ids] += values
    return {}


LOGIT_BIAS = EXTRAS.register("logit_bias")(Extra(
    frozenset(("bias", "logit_bias")), lambda req: req.bias is not None, 30, lambda req, state: req.bias, add_bias))
