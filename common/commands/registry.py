"""Registry of the administrative commands: the files of this folder, and those of installed plug-ins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from ..api.errors import ConfigError
from ..registry import Registry
from .base import Command, Endpoint

COMMANDS: Registry[Command[Any]] = Registry("command", "baton.common.commands", group="baton.commands")


def all_endpoints() -> list[Endpoint]:
    """The endpoints of all commands, whose files are imported. Raises ConfigError for a plug-in that does not load, or
    takes the path of another command."""
    endpoints = _endpoints(COMMANDS.names)
    times = Counter((endpoint.path, method) for endpoint in endpoints for method in endpoint.methods)
    refuse_taken_paths(path for (path, _), count in times.items() if count > 1)
    return endpoints


def refuse_taken_paths(paths: Iterable[str]) -> None:
    """Raises ConfigError where a command's path is one of ``paths``, which others have."""
    if taken := sorted(paths):
        raise ConfigError(f"A plug-in's command has the path {taken[0]}, which is taken: give it another one.")


def own_endpoints() -> list[Endpoint]:
    """The endpoints of this folder's commands."""
    return _endpoints(name for name in COMMANDS.names if COMMANDS.module_of(name) is not None)


def _endpoints(names: Iterable[str]) -> list[Endpoint]:
    return [endpoint for name in names for endpoint in COMMANDS.get(name).endpoints]


def name_of(command: msgspec.Struct) -> str:
    """The name under which a struct's command is registered; raises LookupError."""
    for name in COMMANDS.names:
        if COMMANDS.get(name).struct is type(command):
            return name
    raise LookupError(f"No registered command has the struct {type(command).__name__}.")
