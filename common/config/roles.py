"""The roles of servers as data. Code asks for their facts, as the rules on flags do, and compares no names."""

from __future__ import annotations

from dataclasses import dataclass

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
    argv=("baton.launch", "server"), computes_prompts=True, decodes=True))
ROLES.register("prefill")(Role(
    label="prefill", component="prefill", launcher="baton.prefill.launch", argv=("baton.prefill.launch",),
    computes_prompts=True, sends_kv=True, answers_clients=False))
ROLES.register("decode")(Role(
    label="decode", component="decode", launcher="baton.decode.launch", argv=("baton.decode.launch",),
    decodes=True, receives_kv=True))
