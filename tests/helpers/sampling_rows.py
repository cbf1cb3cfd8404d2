"""Rows for the sampler, with the extras of a request that asks for them."""

from __future__ import annotations

from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.sampling.extras.grammar_mask import GRAMMAR_MASK
from baton.common.sampling.extras.logit_bias import LOGIT_BIAS
from baton.common.sampling.extras.logprobs import LOGPROBS
from baton.common.sampling.extras.min_new_tokens import SUPPRESSED
from baton.common.sampling.extras.penalties import PENALTIES, Penalties
from baton.common.sampling.extras.processor import PROCESSOR, PendingProcessor


def sampling_row(params, position, logprobs=None, suppressed=(), allowed=None, history=None, pending=None, bias=None,
                 processor=None) -> SamplingMetadata:
    extras = {LOGPROBS: logprobs, SUPPRESSED: suppressed or None, GRAMMAR_MASK: allowed, LOGIT_BIAS: bias,
              PENALTIES: history and Penalties(params, history, pending),
              PROCESSOR: processor and PendingProcessor(processor, pending)}
    return SamplingMetadata(params, position, tuple(extra.on(value) for extra, value in extras.items()
                                                    if value is not None))
