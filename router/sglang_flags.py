"""sglang-router's command line: the flags that differ from ours, dropped or refused with a reason.

Flags of the same meaning are simply ours (some as a second spelling). The rest is listed here, so that
a script written for sglang-router either does here what it did there, or fails at once with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..common.api.errors import ConfigError
from ..common.config.foreign_flags import Automatic, ForeignFlags, Refused

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
NOT_NEEDED: dict[str, str] = {
    **dict.fromkeys(("--model-path", "--tokenizer-path", "--chat-template", "--tokenizer-cache-enable-l0",
                     "--tokenizer-cache-l0-max-entries", "--tokenizer-cache-enable-l1",
                     "--tokenizer-cache-l1-max-memory"), _NO_TOKENIZER),
    **dict.fromkeys(("--reasoning-parser", "--tool-call-parser"), _NO_PARSER),
}
"""Flags for gRPC workers, for which sglang-router tokenizes and parses; with HTTP workers they change nothing there
either. They are dropped, and a line on stderr says so."""
_SWITCHES = frozenset(("--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"))

SGLANG_FLAGS = ForeignFlags({
    **{name: Refused(reason) for name, reason in REFUSED.items()},
    **{name: Automatic(reason, "0" if name in _SWITCHES else "1") for name, reason in NOT_NEEDED.items()},
    "--backend": Refused("workers of any make are spoken to alike", ("sglang", "openai")),
    "--history-backend": Refused(_NO_HISTORY, ("none",)),
})


def translate(argv: Sequence[str]) -> list[str]:
    """``argv`` without sglang-router's flags that change nothing here; raises ConfigError for those that would."""
    for word in argv:
        if word.startswith("grpc://"):
            raise ConfigError(f"{word} is not supported: give the worker's HTTP address, http://HOST:PORT.")
    return SGLANG_FLAGS.split(argv, (), "launch_router")[0]


_ROUTER_PREFIX = "--router-"
_CLUSTER_FLAGS = frozenset(("--worker-urls", "--pd-disaggregation", "--prefill", "--decode", "--host", "--port"))
_NOT_ROUTER_FLAGS = frozenset(("--router-dp-worker-base-port",))


def co_launched(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line of ``launch_cluster`` into the cluster's flags and the router's, without their prefix.

    ``--router-FLAG`` becomes ``--FLAG``, as in sglang_router.launch_server. Raises ConfigError for flags that the
    router refuses, and for those that the cluster sets.
    """
    parts: dict[bool, list[str]] = {False: [], True: []}
    is_router = False
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_router = name.startswith(_ROUTER_PREFIX) and name not in _NOT_ROUTER_FLAGS
            if is_router and name != "--router-workers":  # This one has the prefix in its own name.
                word = "--" + word[len(_ROUTER_PREFIX):]
                if word.partition("=")[0] in _CLUSTER_FLAGS:
                    raise ConfigError(f"{name} is not supported: this command starts the workers that its router has; "
                                      "see --prefill, --decode, --dp-size, --host and --port.")
        parts[is_router].append(word)
    return parts[False], translate(parts[True])
