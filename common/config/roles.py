"""The roles of servers as data. Code asks for their facts, as the rules on flags do, and compares no names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ..api.errors import InvalidRequest
from ..registry import Registry


@dataclass(frozen=True)
class Role:
    """Facts of a role. Its registered name is the value of --disaggregation-mode."""

    label: str
    """Its name in sentences ("unified")."""
    launcher: str
    """The module whose ``run`` starts a server of this role."""
    argv: tuple[str, ...]
    """Arguments of ``python -m`` that start such a server, before its flags."""
    component: str
    """Its name in logs, traces and process lists."""
    computes_prompts: bool = False
    """True where prompts of any length are computed; decode servers compute those alone that no prefill server gets."""
    decodes: bool = False
    """True where requests run beyond their first token."""
    sends_kv: bool = False
    """True where KV caches are handed to other servers, which find this one by its bootstrap server."""
    receives_kv: bool = False
    answers_clients: bool = True
    """True where a request is answered whole, as OpenAI's endpoints promise; else the answer is a part of another
    server's."""

    rank: str = ""
    """The module of its engine ranks; ``make_part(parts, unified)`` makes the role's part of an engine of all roles."""

    @property
    def transfers_kv(self) -> bool:
        """True where the KV pool's addresses are known to other servers."""
        return self.sends_kv or self.receives_kv

    @property
    def serves_alone(self) -> bool:
        """True where requests need no other server."""
        return self.computes_prompts and self.decodes


ROLES: Registry[Role] = Registry("role of a server")
ROLES.register("null")(Role(
    label="unified", component="server", launcher="baton.common.serving.unified_server",
    rank="baton.common.engine.rank",
    argv=("baton.launch", "server"), computes_prompts=True, decodes=True))
ROLES.register("prefill")(Role(
    label="prefill", component="prefill", launcher="baton.prefill.launch", rank="baton.prefill.rank",
    argv=("baton.prefill.launch",),
    computes_prompts=True, sends_kv=True, answers_clients=False))
ROLES.register("decode")(Role(
    label="decode", component="decode", launcher="baton.decode.launch", rank="baton.decode.rank",
    argv=("baton.decode.launch",),
    decodes=True, receives_kv=True))
ROLE_HEADER = "x-baton-role"
"""Names the role in which a router asks for a request: the server may have changed its own meanwhile."""


def check_role(name: str, param: str) -> str:
    """Returns the registered name of a role that servers switch to; raises InvalidRequest. The router's name of a
    unified server is taken, too."""
    name = "null" if name in ("regular", "unified") else name
    if name not in ROLES or not (ROLES.get(name).transfers_kv or ROLES.get(name).serves_alone):
        raise InvalidRequest(f"{param} must be prefill, decode or null (both phases), not {name!r}.", param=param)
    return name


def all_duties() -> Role:
    """Returns the facts of a server that may take any of the roles that hand requests to each other."""
    roles = [ROLES.get(name) for name in ROLES.names]
    facts: dict[str, Any] = {fact.name: any(getattr(role, fact.name) for role in roles)
                             for fact in fields(Role) if fact.type == "bool"}
    return replace(roles[0], **facts)
