"""``session_params``: a request that continues the prompts and answers of a session."""

from __future__ import annotations

from ...api.errors import InvalidRequest
from ..protocol.bootstrap import BootstrapFields
from ..protocol.session_params import SessionParams
from .serving_context import ServingContext
from .sessions import SessionTurn


def session_turn(context: ServingContext, params: SessionParams | None, ids: list[list[int]], n: int,
                 body: BootstrapFields) -> SessionTurn | None:
    """Returns the session's request, None without a session; prepends the stored conversation to the prompt in ``ids``.
    ``n``: answers of a prompt. Raises InvalidRequest and NotFound."""
    if params is None:
        return None
    if len(ids) > 1 or body.bootstrap_host is not None:
        raise InvalidRequest("session_params go with one prompt, and with one server.", param="session_params")
    if n > 1:
        raise InvalidRequest("A session's request has one answer: n must be 1.", param="n")
    turn = context.sessions.request(params, ids[0], context.status.serving_tokenizer().bos_id)
    ids[0] = turn.prompt
    return turn
