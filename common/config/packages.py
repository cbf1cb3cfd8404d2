"""Checks which optional packages are installed, and says how to install them: Baton is on no package registry."""

from __future__ import annotations

import importlib.util

from ..api.errors import ConfigError

ENGINE = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "jinja2")
"""Modules that every engine needs."""


def install(extra: str) -> str:
    """Returns the command that installs Baton with an extra."""
    return f"pip install '.[{extra}]' in Baton's source folder, or pip install 'WHEEL[{extra}]' with its wheel"


def needs_engine(missing: str) -> str:
    """Returns a sentence for users of the router's install who ask for the engine."""
    return f"This needs the engine ({missing} not installed): {install('engine')}; on GPUs take [engine,cuda]."


def is_installed(module: str) -> bool:
    """Returns True if a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a submodule of a missing package, or a module that was removed from sys.modules
        return False


def missing_engine() -> str:
    """Returns the modules that the engine lacks, comma-separated; empty when it can run."""
    return ", ".join(name for name in ENGINE if not is_installed(name))


def check_engine() -> None:
    """Raises ConfigError when the engine's packages are not installed."""
    if missing := missing_engine():
        raise ConfigError(needs_engine(missing))
