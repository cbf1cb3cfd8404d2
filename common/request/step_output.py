"""Step output: what a step has computed for its requests, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ..api.drafts import Drafts
from ..api.errors import NON_FINITE_LOGITS, ServingError, from_code
from ..api.messages import Logprobs
from .position_rows import ROUTED_EXPERTS

if TYPE_CHECKING:
    from .req import Req
    from .step_input import StepInput


class RowOutput(msgspec.Struct, array_like=True):
    """The results of a request in a step besides tokens. With ``error_code`` (a ServingError's) it fails, and its
    tokens mean nothing. ``hidden_states`` are float32 rows, little endian."""

    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: bytes | None = None
    routed_experts: bytes | None = None
    error_code: str | None = None
    error: str = ""


class StepOutput(msgspec.Struct, array_like=True):
    """The output of a step. ``req_index``: its requests that got tokens, ascending, by their index in the StepInput;
    ``counts``: how many tokens each got, at least one, but for requests that had ended before; ``tokens``: these, one
    request after the other. ``extras``: what some requests, also others, get besides. ``drafts``: what may follow, for
    the next step to verify, by the request's index in the StepInput; after a chain step instead ``chain_drafts``, those
    of all its requests. ``num_drafts``: how many the step verified for each request in ``req_index``; empty where
    none."""

    req_index: list[int]
    counts: list[int]
    tokens: list[int]
    extras: dict[int, RowOutput] = {}
    drafts: dict[int, Drafts] = {}
    chain_drafts: list[list[int]] = []
    num_drafts: list[int] = []


class RowResult(NamedTuple):
    """The part of one request that got tokens; with an ``error`` it fails instead. ``drafts``: what may follow.
    ``num_drafts``: how many the step verified."""

    req: Req
    token_ids: list[int]
    logprobs: Logprobs | None
    error: ServingError | None
    drafts: Drafts | None = None
    num_drafts: int = 0


def keep_accepted(step: StepInput, counts: Sequence[int], rows: Sequence[int], extras: dict[int, RowOutput]) -> None:
    """Removes from ``extras`` what belongs to rows of drafts that were not accepted. ``counts`` of the requests in
    ``step.sample_index`` and ``rows`` say which were, by their samples."""
    ends = step.num_samples.cumsum()
    begin = 0
    for index, count in zip(step.sample_index, counts):
        own, begin = rows[begin:begin + count], begin + count
        output = extras.get(index)
        if output is None or index not in step.drafts:
            continue
        num_samples = int(step.num_samples[index])
        places = [row - int(ends[index]) + num_samples for row in own]
        if output.logprobs is not None:
            output.logprobs = picked(output.logprobs, places)
        if output.hidden_states is not None:
            states = np.frombuffer(output.hidden_states, "<f4").reshape(num_samples, -1)
            output.hidden_states = states[places].tobytes()


def picked(logprobs: Logprobs, places: Sequence[int]) -> Logprobs:
    """Returns the log-probabilities at ``places``."""
    return Logprobs([logprobs.token_ids[i] for i in places], [logprobs.values[i] for i in places],
                    [logprobs.top[i] for i in places], [logprobs.of_ids[i] for i in places])


def add_prompt_results(step: StepInput, output: StepOutput) -> None:
    """Appends prompt log-probabilities and hidden states to their requests."""
    counts = dict(zip(output.req_index, output.counts)) if step.drafts else {}
    for index, extra in output.extras.items():
        req = step.reqs[index]
        if extra.prompt_logprobs is not None:
            req.add_prompt_logprobs(extra.prompt_logprobs)
        if extra.hidden_states is not None:
            assert req.hidden is not None
            states = np.frombuffer(extra.hidden_states, "<f4")
            if index in step.drafts:
                states = states.reshape(counts[index], -1)
                req.hidden.num_launched += counts[index] - 1
            req.hidden.add(states)
        if extra.routed_experts is not None:
            assert req.routed is not None
            req.routed.add(np.frombuffer(extra.routed_experts, ROUTED_EXPERTS))


def row_results(step: StepInput, output: StepOutput, chosen: Sequence[int] | None = None) -> Iterator[RowResult]:
    """Yields the results of requests that got tokens, in batch order: those at ``chosen`` indices of ``req_index``
    (ascending), by default all."""
    ends = list(accumulate(output.counts))
    for i in range(len(ends)) if chosen is None else chosen:
        index = output.req_index[i]
        extra = output.extras.get(index)
        error = None if extra is None or extra.error_code is None else from_code(extra.error_code, extra.error)
        if error is not None and error.code == NON_FINITE_LOGITS:
            step.reqs[index].keeps_pages = False
        yield RowResult(step.reqs[index], output.tokens[ends[i] - output.counts[i]:ends[i]],
                        None if extra is None else extra.logprobs, error, output.drafts.get(index),
                        output.num_drafts[i] if output.num_drafts else 0)
