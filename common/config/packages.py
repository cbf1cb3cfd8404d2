"""What of Baton's optional parts is installed, and how to install it: Baton is on no package registry."""

from __future__ import annotations

import importlib.util

from ..api.errors import ConfigError

ENGINE = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "jinja2")
"""Modules that every engine needs."""


def install(extra: str) -> str:
    """The command that installs Baton with an extra."""
    return f"pip install '.[{extra}]' in Baton's source folder, or pip install 'WHEEL[{extra}]' with its wheel"


def needs_engine(missing: str) -> str:
    """A sentence for whoever has the router's install and asks for more."""
    return f"This needs the engine ({missing} not installed): {install('engine')}; on GPUs take [engine,cuda]."


def has(module: str) -> bool:
    """Whether a module could be imported; nothing is imported for it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a part of a package that is missing, or a module that was put away
        return False


def missing_engine() -> str:
    """The modules that the router's install lacks, with commas between them; empty where the engine can run."""
    return ", ".join(name for name in ENGINE if not has(name))


def check_engine() -> None:
    """Raises ConfigError in the router's install."""
    if missing := missing_engine():
        raise ConfigError(needs_engine(missing))
