"""Flags of ``/v1/responses``: the store of answers, and tools that the server runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import Rule, ServerRule, at_least

_ADDRESS = re.compile(r"demo|https?://\S+|\S+:[0-9]{1,5}")


@dataclass(frozen=True)
class ResponsesArgs:
    response_store_entries: int = flag(1024, help=(
        "answers of /v1/responses that are stored in memory, for previous_response_id and background; the oldest make "
        "room, 0 stores none"))
    response_store_mb: int = flag(256, help="most MiB of stored answers with their conversations")

    tool_server: str | None = flag(None, help=(
        "runs tools within /v1/responses: MCP servers as host:port,host:port (or URLs), or demo, which runs Python in "
        "docker"))
    max_tool_rounds: int = flag(16, help="most rounds of tools in one answer of /v1/responses")

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.responses.tool_server is not None and not c.duties.answers_clients,
             "--tool-server is for unified and decode servers: a prefill server answers no requests by itself."),
    )

    @property
    def stored_entries(self) -> int:
        return self.response_store_entries if self.response_store_mb else 0

    def __post_init__(self) -> None:
        at_least(self, 0, "response_store_entries", "response_store_mb")
        at_least(self, 1, "max_tool_rounds")
        for address in self.tool_server.split(",") if self.tool_server is not None else ():
            if not _ADDRESS.fullmatch(address.strip()):
                raise ConfigError(f"--tool-server takes demo, or addresses as host:port, not {address.strip()!r}.")
