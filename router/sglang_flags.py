"""sglang-router's command line where it differs from ours: what is taken, and what is refused with its reason.

Flags of the same meaning are simply ours (some as a second spelling). The rest stands here, so that
a script written for sglang-router either does here what it did there, or says at once what it cannot do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..common.api.errors import ConfigError

_NO_TOKENIZER = "prompts are read as they are"
_NO_PARSER = "answers pass through as they are; the workers have the parser"
_NO_HISTORY = "no conversations are stored here; use the workers' /v1/responses, which is relayed"
_NO_JWT = "use --admin-api-key or --control-plane-api-keys"

REFUSED: dict[str, str] = {
    "--mini-lb": "there is one router; leave the flag away",
    "--prometheus-duration-buckets": "the buckets are fixed, so that routers can be added up; leave the flag away",
    "--mcp-config-path": "no tools are called here; use the workers' own",
    **dict.fromkeys((
        "--oracle-wallet-path", "--oracle-tns-alias", "--oracle-connect-descriptor", "--oracle-username",
        "--oracle-password", "--oracle-pool-min", "--oracle-pool-max", "--oracle-pool-timeout-secs",
        "--postgres-db-url", "--postgres-pool-max", "--redis-url", "--redis-pool-max", "--redis-retention-days",
    ), _NO_HISTORY),
    **dict.fromkeys(("--jwt-issuer", "--jwt-audience", "--jwt-jwks-uri", "--jwt-role-mapping"), _NO_JWT),
    "--control-plane-audit-enabled": "the access log (--log-level info) has every request; use that",
}
_SAME_ANYWAY: dict[str, tuple[frozenset[str], str]] = {
    "--backend": (frozenset(("sglang", "openai")), "workers of any make are spoken to alike"),
    "--history-backend": (frozenset(("none",)), _NO_HISTORY),
}
"""Flags of which some values ask for what happens anyway; those are dropped."""

NOT_NEEDED: dict[str, str] = {
    **dict.fromkeys(("--model-path", "--tokenizer-path", "--chat-template", "--tokenizer-cache-enable-l0",
                     "--tokenizer-cache-l0-max-entries", "--tokenizer-cache-enable-l1",
                     "--tokenizer-cache-l1-max-memory"), _NO_TOKENIZER),
    **dict.fromkeys(("--reasoning-parser", "--tool-call-parser"), _NO_PARSER),
}
"""Flags for gRPC workers, for which sglang-router tokenizes and parses: before HTTP workers they change nothing there
either. They are dropped, with a line that says so."""
_SWITCHES = frozenset(("--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"))


def translate(argv: Sequence[str]) -> list[str]:
    """``argv`` without sglang-router's flags that change nothing here; raises ConfigError for those that would."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, joined, value = word.partition("=")
        if word.startswith("grpc://"):
            raise ConfigError(f"{word} is not supported: give the worker's HTTP address, http://HOST:PORT.")
        if name in REFUSED:
            raise ConfigError(f"{name} is not supported: {REFUSED[name]}.")
        if name not in _SAME_ANYWAY and name not in NOT_NEEDED:
            kept.append(word)
            continue
        if not joined and name not in _SWITCHES:
            value = next(words, "")
        if name in NOT_NEEDED:
            print(f"launch_router: {name} is not needed: {NOT_NEEDED[name]}.", file=sys.stderr)
            continue
        accepted, reason = _SAME_ANYWAY[name]
        if value not in accepted:
            raise ConfigError(f"{name} {value} is not supported: {reason}.")
    return kept


_OWN_PREFIX = "--router-"
_CLUSTERS = frozenset(("--worker-urls", "--pd-disaggregation", "--prefill", "--decode", "--host", "--port"))
_NOT_THE_ROUTERS = frozenset(("--router-dp-worker-base-port",))


def co_launched(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line of ``launch_cluster`` as its own and its router's part: ``--router-FLAG`` becomes ``--FLAG``.

    As in sglang_router.launch_server. Raises ConfigError for what the router refuses, and for what the cluster decides.
    """
    parts: dict[bool, list[str]] = {False: [], True: []}
    is_router = False
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_router = name.startswith(_OWN_PREFIX) and name not in _NOT_THE_ROUTERS
            if is_router and name != "--router-workers":  # This one is the router's own spelling.
                word = "--" + word[len(_OWN_PREFIX):]
                if word.partition("=")[0] in _CLUSTERS:
                    raise ConfigError(f"{name} is not supported: this command starts the workers that its router has; "
                                      "see --prefill, --decode, --dp-size, --host and --port.")
        parts[is_router].append(word)
    return parts[False], translate(parts[True])
