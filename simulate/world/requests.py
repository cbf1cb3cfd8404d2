"""Prompts of simulated requests as token ids, and the requests that engines get."""

from __future__ import annotations

import numpy as np

from ...common.api.messages import Bootstrap
from ...common.api.sampling import SamplingParams
from ...common.request.req import Req
from ...common.request.token_buffer import TokenBuffer
from ..workload.request import SimRequest

_NO_STOPS: frozenset[int] = frozenset()


class Prompts:
    """Token ids of prompts: equal for equal blocks after equal blocks, else different in the first page already."""

    def __init__(self) -> None:
        self._next_own = -(1 << 31)

    def tokens(self, request: SimRequest) -> np.ndarray:
        """Returns [input_len] int32."""
        size, count = request.block_size, request.input_len
        shared = np.array(request.blocks[:count // size], np.int64)
        own = count - len(shared) * size
        tokens = np.empty(count, np.int32)
        if len(shared):
            tokens[:len(shared) * size] = (shared[:, None] * size % (1 << 31) + np.arange(size)).ravel()
        if own:
            if self._next_own + own >= 0:
                self._next_own = -(1 << 31)
            tokens[len(shared) * size:] = np.arange(self._next_own, self._next_own + own, dtype=np.int32)
            self._next_own += own
        return tokens


def sampling_of(output_len: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=output_len, ignore_eos=True)


def req_of(rid: str, tokens: np.ndarray, sampling: SamplingParams, now: float,
           bootstrap: Bootstrap | None = None) -> Req:
    """Returns the request as an engine has it."""
    return Req(rid=rid, tokens=TokenBuffer(tokens), num_prompt_tokens=len(tokens),  # type: ignore[arg-type]
               sampling=sampling, stop_ids=_NO_STOPS, arrived=now, deadline=float("inf"), bootstrap=bootstrap)
