"""Sessions: a client sends only new input, and the server prepends the stored conversation.

A session is a tree of requests. Each begins with the tokens of the one that its ``rid`` names: prompt and output. The
prefix cache makes that cheap, but does not store the session: it outlives its pages. (SGLang's sessions; the wire
fields are theirs.)
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from ...api.errors import Conflict, InvalidRequest, NotFound, Overloaded
from ..protocol.session_params import SessionParams

IDLE_SECONDS = 3600.0
MAX_SESSIONS = 10_000


@dataclass
class _Node:
    """A finished request."""

    prompt: list[int]
    output: list[int]
    children: set[str] = field(default_factory=set)


@dataclass
class _Session:
    capacity: int  # tokens that it may store
    nodes: dict[str, _Node] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        return sum(len(node.prompt) + len(node.output) for node in self.nodes.values())

    def drop(self, rid: str) -> None:
        """Removes a request and all that continue it."""
        waiting = [rid]
        while waiting:
            node = self.nodes.pop(waiting.pop(), None)
            waiting += node.children if node is not None else ()


@dataclass(frozen=True)
class SessionTurn:
    """A request of a session that is being answered."""

    session: _Session
    parent: str | None
    prompt: list[int]

    def store(self, rid: str, output: list[int]) -> None:
        """Stores the request; raises nothing, for the answer is already being sent."""
        session = self.session
        session.used = time.monotonic()
        if session.num_tokens + len(self.prompt) + len(output) <= session.capacity:
            session.nodes[rid] = _Node(self.prompt, list(output))
            if self.parent in session.nodes:
                session.nodes[self.parent].children.add(rid)


class Sessions:
    """The sessions of one server. A session that is not used for an hour is dropped."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, capacity: int, name: str | None) -> str:
        """Opens a session and returns its id; raises Conflict for an id in use, InvalidRequest, Overloaded."""
        if capacity < 1:
            raise InvalidRequest(f"capacity_of_str_len must be 1 or more, not {capacity}.", param="capacity_of_str_len")
        if name is not None and name in self._sessions:
            raise Conflict(f"Session {name!r} is open; choose another id.", param="session_id")
        self._drop_idle()
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} sessions are open; close some.")
        name = name or uuid.uuid4().hex
        self._sessions[name] = _Session(capacity)
        return name

    def close(self, name: str) -> None:
        """Raises NotFound."""
        self._get(name)
        del self._sessions[name]

    def request(self, params: SessionParams, new: list[int], bos: int | None) -> SessionTurn:
        """The request whose prompt is the stored conversation and then ``new``; raises NotFound, InvalidRequest.

        ``bos`` is the tokenizer's first token: it is dropped from tokens that follow others.
        """
        session = self._get(params.id)
        session.used = time.monotonic()
        if params.rid is None:
            if params.replace:
                session.nodes.clear()
            return SessionTurn(session, None, new)
        node = session.nodes.get(params.rid)
        if node is None:
            raise InvalidRequest(f"The session has no finished request {params.rid!r} to continue.",
                                 param="session_params.rid")
        if params.replace:
            for child in node.children:
                session.drop(child)
            node.children.clear()
        before = node.prompt if params.drop_previous_output else node.prompt + node.output
        if params.offset is not None and params.offset != -1:
            if not 0 <= params.offset <= len(before):
                raise InvalidRequest(f"offset must be -1 or between 0 and {len(before)}, got {params.offset}.",
                                     param="session_params.offset")
            before = before[: params.offset]
        if before and new[0] == bos:
            new = new[1:]
        return SessionTurn(session, params.rid, before + new)

    def _get(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise NotFound(f"There is no open session {name!r}; call /open_session.", param="session_params.id")
        return session

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        for name in [name for name, session in self._sessions.items() if session.used < oldest]:
            del self._sessions[name]
