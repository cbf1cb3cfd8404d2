"""Descriptions of models by other files than config.json: one file each in ``described``, registered there. It imports
no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ..registry import Registry
from .server import ModelArgs


class Describe(Protocol):
    """Reads what config.json would say."""

    def __call__(self, args: ModelArgs, path: Path) -> dict[str, Any] | None:
        """Returns the values of the checkpoint at ``path``, a folder or a file, under Hugging Face's names; None where
        this is not what describes it. Raises ConfigError for one that cannot be read, or is not supported."""


DESCRIPTIONS: Registry[Describe] = Registry("description of checkpoints", "baton.common.config.described")


def describe(args: ModelArgs, path: Path) -> dict[str, Any] | None:
    """Returns the first description that there is, None where config.json is to be read."""
    for name in DESCRIPTIONS.names:
        found = DESCRIPTIONS.get(name)(args, path)
        if found is not None:
            return found
    return None
