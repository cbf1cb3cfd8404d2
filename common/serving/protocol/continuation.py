"""Stream continuation: an answer that one server began and another continues, because the first one died.

A router asks for ``X-Baton-Token-Ids: 1`` with a streamed request; each event then names the tokens that it ends with.
(The events of ``/v1/messages`` and ``/v1/responses`` must have no further fields: there the ids are in comments after
them, which readers of event streams ignore.) When the stream breaks the router sends the same request
elsewhere with ``continuation`` added, and gets the remaining events: text, tool calls, token counts and ids are
those of one unbroken answer. Greedy and seeded requests choose their tokens by position, so the answer itself
is the same, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from ...api.errors import InvalidRequest
from ...api.messages import Generate
from ...api.token_ids import check_ids
from ...api.wire import Int32, Int64

HEADER = "X-Baton-Token-Ids"


class Continuation(msgspec.Struct):
    """The output so far: ``token_ids`` in order; ``id`` and ``created`` as its events named them, and the
    ``sequence_number`` of the last event, where they have one."""

    token_ids: list[Int32]
    id: str | None = None
    created: Int64 | None = None
    sequence_number: Int64 | None = None


class _NamesModel(Protocol):
    """The fields of a request body that a ResponseHeader is made of."""

    model: str | None
    continuation: Continuation | None


class ResponseHeader(NamedTuple):
    """The fields that all chunks of an answer share; a continued answer keeps those of its beginning."""

    id: str
    created: int
    model: str

    @classmethod
    def of(cls, body: _NamesModel, id_prefix: str, served_model: str) -> ResponseHeader:
        """``served_model`` is named where the request names none."""
        begun = body.continuation
        answer_id = (begun and begun.id) or f"{id_prefix}{uuid.uuid4().hex}"
        return cls(answer_id, (begun and begun.created) or int(time.time()), body.model or served_model)


def continue_after(given: Continuation | None, requests: list[Generate], vocab_size: int) -> Sequence[int]:
    """Appends the output so far to the prompt, and subtracts it from the token budget; returns it.

    Mutates the only one of ``requests``; raises InvalidRequest where there are more, or the answer is complete.
    """
    if given is None or not given.token_ids:
        return ()
    if len(requests) != 1 or requests[0].return_logprob:
        raise InvalidRequest("continuation works for one prompt with n=1 and without logprobs.", param="continuation")
    check_ids(given.token_ids, vocab_size, "continuation.token_ids")
    request, done = requests[0], len(given.token_ids)
    sampling = request.sampling
    if done >= sampling.max_new_tokens:
        raise InvalidRequest(f"continuation holds {done} tokens, and the request allows {sampling.max_new_tokens}: the "
                             "answer is complete.", param="continuation")
    request.input_ids = [*request.input_ids, *given.token_ids]
    request.num_answered = done
    request.sampling = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - done,
                                               min_new_tokens=max(0, sampling.min_new_tokens - done))
    return given.token_ids
