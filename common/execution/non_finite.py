"""Fails requests whose logits were not finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..api.errors import NON_FINITE_LOGITS, ServingError
from ..request.sampling_metadata import NOT_FINITE
from ..request.step_input import StepInput
from ..request.step_output import RowOutput

log = logging.getLogger("baton.engine")


def fail_non_finite(step: StepInput, counts: Sequence[int], tokens: Sequence[int],
                    extras: dict[int, RowOutput]) -> None:
    """Adds an error to ``extras`` for each request whose new ``tokens`` have NOT_FINITE; ``counts`` of the requests in
    ``step.sample_index``."""
    end = 0
    for index, count in zip(step.sample_index, counts):
        begin, end = end, end + count
        if NOT_FINITE not in tokens[begin:end]:
            continue
        req = step.reqs[index]
        error = ServingError("The model's logits were not finite (NaN or infinity): the weights, the device or a "
                             "kernel is at fault; the server's log names the request.", code=NON_FINITE_LOGITS)
        log.error("The logits of request %s were not finite after %d tokens.", req.rid, len(req.tokens))
        output = extras.setdefault(index, RowOutput())
        output.error_code, output.error = error.wire_code, error.message
