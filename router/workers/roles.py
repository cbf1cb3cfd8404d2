"""The roles of workers, with the facts of the servers that take them."""

from __future__ import annotations

from ...common.config.roles import ROLES, Role


def _ordered() -> list[str]:
    """The roles of servers: those that need no other, then in the order in which a request meets them."""
    return sorted(ROLES, key=lambda name: (not ROLES.get(name).serves_alone, ROLES.get(name).receives_kv))


WORKER_ROLES: dict[str, Role] = {
    "regular" if ROLES.get(name).serves_alone else name: ROLES.get(name) for name in _ordered()}
"""Facts by the names that the router has for roles, sglang-router's; a unified server is a regular worker."""
REGULAR = next(name for name, facts in WORKER_ROLES.items() if facts.serves_alone)
SENDER = next(name for name, facts in WORKER_ROLES.items() if facts.sends_kv)
RECEIVER = next(name for name, facts in WORKER_ROLES.items() if facts.receives_kv)
PAIR = (SENDER, RECEIVER)
"""The roles of a pair's workers."""


def answering_role(*, pairs: bool) -> str:
    """The role whose workers answer clients, alone or for their pair."""
    return RECEIVER if pairs else REGULAR


def roles_of(*, pairs: bool) -> tuple[str, ...]:
    """The roles that a router's workers may have."""
    return tuple(name for name, facts in WORKER_ROLES.items() if facts.serves_alone is not pairs)


def can_serve_as(mode: object, role: str) -> bool:
    """Returns False for a server whose ``disaggregation_mode`` excludes it from a worker role. Our decode servers serve
    alone, too; modes of other engines exclude nothing."""
    if not isinstance(mode, str) or mode not in ROLES:
        return True
    facts = ROLES.get(mode)
    return WORKER_ROLES[role] is facts or (WORKER_ROLES[role].serves_alone and facts.answers_clients)


def role_among(mode: object, role: str) -> str | None:
    """The worker role that a server takes which has changed its own to ``mode``, in the cluster of a worker of
    ``role``; None where it can serve there in none. Among pairs a unified server computes whole requests, as a decode
    worker may."""
    if mode not in ROLES:
        return None
    facts = ROLES.get(str(mode))
    if WORKER_ROLES[role].serves_alone:
        return role if facts.answers_clients else None
    return RECEIVER if facts.serves_alone else role_of_mode(mode)


def role_of_mode(mode: object) -> str:
    """The worker role of a server that reports this ``disaggregation_mode``."""
    return mode if isinstance(mode, str) and mode in WORKER_ROLES else REGULAR
