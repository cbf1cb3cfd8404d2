"""Registry of the administrative commands: the files of this folder, and those of installed plug-ins."""

from __future__ import annotations

from typing import Any

import msgspec

from ..registry import Registry
from .base import Command, Endpoint

COMMANDS: Registry[Command[Any]] = Registry("command", "baton.common.commands", group="baton.commands")


def all_commands() -> dict[str, Command[Any]]:
    """Imports every command's file; returns the commands by name. Raises ConfigError for a plug-in that does not
    load."""
    return {name: COMMANDS.get(name) for name in COMMANDS.names}


def all_endpoints() -> list[Endpoint]:
    return [endpoint for command in all_commands().values() for endpoint in command.endpoints]


def name_of(command: msgspec.Struct) -> str:
    """The name under which a struct's command is registered; raises LookupError."""
    for name, each in all_commands().items():
        if each.struct is type(command):
            return name
    raise LookupError(f"No registered command has the struct {type(command).__name__}.")
